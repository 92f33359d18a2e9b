// One streamed chat completion. Its connection may break: the stream then goes on after the last
// event that came, at the same gateway or another one.

import { ApiError, delay, serverSentEvents } from "./api.js";

const PATH = "/v1/chat/completions";
const GIVE_UP_MS = 120_000;
// Time for the id of a request to come after it was stopped: the server names it within a second.
const STOP_MS = 3000;

export class Generation {
  #api;
  #body;
  #abort = new AbortController();
  #lastEvent = null;
  #stopped = false;
  id = null;

  /** `body` is that of the request; `onState(text)` is told of a broken connection, then null. */
  constructor(api, body, onState) {
    this.#api = api;
    this.#body = { ...body, stream: true, stream_options: { include_usage: true } };
    this.onState = onState;
  }

  get stopped() {
    return this.#stopped;
  }

  /** Yields the chunks of the answer. Raises ApiError. Ends silently when it was stopped. */
  async *chunks() {
    try {
      let response = await this.#open();
      while (!this.#stopped) {
        if (yield* this.#read(response)) return;
        response = await this.#resume();
      }
    } catch (error) {
      if (!this.#stopped) throw error;
    }
  }

  /**
   * Ends the request: the server cancels it, and its engine stops. Such a request outlives its
   * connection, so closing that alone would not be enough.
   */
  stop({ leaving = false } = {}) {
    if (this.#stopped) return;
    this.#stopped = true;
    if (this.id === null && !leaving) setTimeout(() => this.#abort.abort(), STOP_MS);
    else this.#cancel(leaving);
  }

  async #open() {
    const response = await this.#api.send(PATH, {
      method: "POST",
      body: this.#body,
      headers: { "x-resumable": "true" },
      signal: this.#abort.signal,
    });
    const location = response.headers.get("content-location") ?? "";
    this.id = location.split("/").pop() || null;
    if (this.#stopped) this.#cancel(false);
    return response;
  }

  #cancel(leaving) {
    if (this.id !== null) {
      const cancelled = this.#api.send(`/v1/requests/${this.id}`, { method: "DELETE", keepalive: leaving });
      cancelled.catch(() => {}); // it has ended meanwhile, or the gateway is gone
    }
    this.#abort.abort();
  }

  /** Yields chunks until the stream ends; returns whether it is complete. */
  async *#read(response) {
    const events = serverSentEvents(response);
    for (;;) {
      let next;
      try {
        next = await events.next();
      } catch (error) {
        if (this.#stopped || this.id === null) throw error;
        return false;
      }
      if (next.done) return this.#stopped;
      const { id, data } = next.value;
      if (data === "[DONE]") return true;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(200, chunk.error.message, chunk.error.code);
      if (id !== null) this.#lastEvent = id;
      yield chunk;
    }
  }

  async #resume() {
    if (this.id === null) throw new ApiError(0, "The connection broke before the answer began.");
    const until = performance.now() + GIVE_UP_MS;
    this.onState("The connection broke. Connecting again…");
    for (let wait = 250; ; wait = Math.min(wait * 2, 4000)) {
      try {
        const response = await this.#api.send(`/v1/requests/${this.id}/events`, {
          headers: this.#lastEvent === null ? {} : { "last-event-id": this.#lastEvent },
          signal: this.#abort.signal,
        });
        this.onState(null);
        return response;
      } catch (error) {
        const lasting = error instanceof ApiError && error.status < 500;
        if (this.#stopped || lasting || performance.now() > until) throw error;
        await delay(wait, this.#abort.signal);
      }
    }
  }
}
