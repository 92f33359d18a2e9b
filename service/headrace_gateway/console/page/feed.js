// The live stream of the gateway, shared by the views. It is open only while a view uses it and the
// page can be seen, since engines do extra work for watchers.

import { delay, serverSentEvents } from "./api.js";

// The gateway sends an event at least every 2 s.
const SILENT_MS = 8000;
const MOST_WAIT_MS = 8000;

export class LiveFeed {
  #api;
  #watchers = new Set();
  #abort = null;

  constructor(api) {
    this.#api = api;
    document.addEventListener("visibilitychange", () => this.#adjust());
  }

  /** Calls `watcher.snapshot(data)` and `watcher.state(text)`; null is the state of a good stream. */
  watch(watcher) {
    this.#watchers.add(watcher);
    this.#adjust();
  }

  unwatch(watcher) {
    this.#watchers.delete(watcher);
    this.#adjust();
  }

  #adjust() {
    const wanted = this.#watchers.size > 0 && !document.hidden;
    if (wanted && this.#abort === null) {
      this.#abort = new AbortController();
      this.#run(this.#abort.signal);
    } else if (!wanted && this.#abort !== null) {
      this.#abort.abort();
      this.#abort = null;
    }
  }

  async #run(stop) {
    let wait = 500;
    while (!stop.aborted) {
      try {
        await this.#read(stop, () => (wait = 500));
        this.#say("The live data ended; connecting again…");
      } catch (error) {
        if (stop.aborted) return;
        this.#say(explained(error));
        if (error.status === 401 || error.status === 404) {
          if (this.#abort?.signal === stop) this.#abort = null;
          return;
        }
        wait = Math.max(wait, (error.retryAfter ?? 0) * 1000);
      }
      await delay(Math.min(wait, MOST_WAIT_MS), stop);
      wait *= 2;
    }
  }

  async #read(stop, succeeded) {
    const silent = new AbortController();
    let timer = setTimeout(() => silent.abort(), SILENT_MS);
    try {
      const signal = AbortSignal.any([stop, silent.signal]);
      const response = await this.#api.send("/console/live", { signal });
      for await (const event of serverSentEvents(response)) {
        clearTimeout(timer);
        timer = setTimeout(() => silent.abort(), SILENT_MS);
        if (event.event !== "snapshot") continue;
        const snapshot = JSON.parse(event.data);
        if (stop.aborted) return;
        succeeded();
        this.#say(null);
        for (const watcher of this.#watchers) watcher.snapshot(snapshot);
      }
    } finally {
      clearTimeout(timer);
    }
  }

  #say(text) {
    for (const watcher of this.#watchers) watcher.state?.(text);
  }
}

function explained(error) {
  if (error.status === 404) return "This gateway has no live data: its setting `console` is off.";
  if (error.status === 429) return "Too many pages watch this gateway. Close one, or wait.";
  if (error.status) return error.message;
  return "The gateway does not answer; connecting again…";
}
