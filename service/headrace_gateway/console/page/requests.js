// The view Requests: recent requests with their timelines.

import { delay } from "./api.js";
import { KeyedList, h, setAttributes, setText, svg } from "./dom.js";
import { clockTime, count, engineName, plural, requestId, seconds, shortRequest } from "./format.js";

const get = (id) => document.getElementById(id);
const POLL_MS = 1000;
const WIDTH = 1000;

export class RequestsView {
  #api;
  #abort = null;
  #requests = [];
  #rows = new KeyedList(get("request-rows"), (request) => request.key, (request) => (request.details ? new DetailRow() : new RequestRow(() => this.#draw())));
  #open = new Set();

  constructor({ api }) {
    this.#api = api;
    for (const id of ["state-filter", "id-filter"]) get(id).addEventListener("input", () => this.#draw());
    document.addEventListener("visibilitychange", () => {
      if (get("view-requests").hidden) return;
      if (document.hidden) this.hide();
      else this.show();
    });
  }

  show() {
    this.hide();
    this.#abort = new AbortController();
    this.#poll(this.#abort.signal);
  }

  hide() {
    this.#abort?.abort();
    this.#abort = null;
  }

  async #poll(signal) {
    while (!signal.aborted) {
      try {
        const { requests, time } = await this.#api.json("/console/requests", { signal });
        if (signal.aborted) return;
        const now = time ?? Date.now() / 1000;
        this.#requests = requests.map((request) => ({ ...request, now }));
        this.#draw();
        setText(get("requests-state"), "");
      } catch (error) {
        if (signal.aborted) return;
        const off = error.status === 404;
        setText(get("requests-state"), off ? "This gateway shows no requests: its setting `console` is off." : (error.status ? error.message : "The gateway does not answer; trying again…"));
        if (off || error.status === 401) return;
      }
      await delay(POLL_MS, signal);
    }
  }

  #draw() {
    const state = get("state-filter").value;
    const id = get("id-filter").value.trim();
    const shown = this.#requests.filter((request) => (!state || request.state === state) && requestId(request.id).startsWith(id));
    const longest = niceEnd(Math.max(0.1, ...shown.map(duration)));
    setText(get("axis-end"), seconds(longest));
    const rows = shown.flatMap((request) => {
      const row = { ...request, key: request.id, longest, opened: this.#open };
      return this.#open.has(request.id) ? [row, { ...row, key: `${request.id}/details`, details: true }] : [row];
    });
    this.#rows.update(rows);
    get("no-requests").hidden = this.#requests.length > 0;
  }
}

/** A request that has not ended lasts until the latest thing that is known of it, or until now. */
function duration({ times, events, now }) {
  const latest = times.ended ?? Math.max(times.accepted, ...events.map((event) => event.time), now);
  return Math.max(0, latest - times.accepted);
}

/** The end of the axis: the next of 1, 2 or 5 times a power of ten, so that it seldom changes. */
function niceEnd(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * power >= value) * power;
}

/** The parts of a request's time: `kind`, `from` and `to` in seconds after it was accepted. */
export function segments(request) {
  const { accepted, started, first_token: first } = request.times;
  const end = duration(request);
  const at = (time) => (time == null ? end : Math.max(0, time - accepted));
  const parts = [
    { kind: "queued", from: 0, to: at(started) },
    { kind: "prefill", from: at(started), to: at(first) },
    { kind: "decode", from: at(first), to: end },
  ];
  return parts.filter((part) => part.to > part.from);
}

class RequestRow {
  #time = h("td");
  #button = h("button", { type: "button", class: "link", "aria-expanded": "false" });
  #state = h("span", { class: "badge" });
  #prompt = h("td", { class: "number" });
  #output = h("td", { class: "number" });
  #duration = h("td", { class: "number" });
  #chart = svg("svg", { class: "timeline", viewBox: `0 0 ${WIDTH} 18`, preserveAspectRatio: "none", role: "img" });
  #request = null;

  constructor(redraw) {
    this.#button.addEventListener("click", () => {
      const { opened, id } = this.#request;
      if (!opened.delete(id)) opened.add(id);
      redraw();
    });
    this.element = h("tr", {}, this.#time, h("td", {}, this.#button), h("td", {}, this.#state), this.#prompt, this.#output, this.#duration, h("td", { class: "timeline-cell" }, this.#chart));
  }

  update(request) {
    this.#request = request;
    setText(this.#time, clockTime(request.times.accepted));
    setText(this.#button, shortRequest(request.id));
    setAttributes(this.#button, { "aria-expanded": request.opened.has(request.id), "aria-label": `Details of request ${shortRequest(request.id)}` });
    setText(this.#state, request.error ?? (request.state === "finished" ? (request.finish_reason ?? "finished") : request.state));
    setAttributes(this.#state, { class: `badge ${request.state}` });
    setText(this.#prompt, count(request.prompt_tokens ?? 0));
    setText(this.#output, count(request.output_tokens ?? 0));
    setText(this.#duration, seconds(duration(request)));
    this.#draw(request);
  }

  #draw(request) {
    const x = (time) => (WIDTH * time) / request.longest;
    const parts = segments(request).map(({ kind, from, to }) => ({ class: `bar ${kind}`, x: x(from).toFixed(1), y: kind === "prefill" ? 1 : kind === "decode" ? 3 : 6, width: Math.max(2, x(to) - x(from)).toFixed(1), height: kind === "prefill" ? 16 : kind === "decode" ? 12 : 6 }));
    for (const event of request.events.filter(({ what }) => what === "moved" || what === "preempted")) {
      parts.push({ class: `bar ${event.what}`, x: (x(event.time - request.times.accepted) - 3).toFixed(1), y: 0, width: 6, height: 18 });
    }
    while (this.#chart.children.length < parts.length) this.#chart.append(svg("rect"));
    while (this.#chart.children.length > parts.length) this.#chart.lastElementChild.remove();
    parts.forEach((part, index) => setAttributes(this.#chart.children[index], part));
    const texts = segments(request).map(({ kind, from, to }) => `${kind} ${seconds(to - from)}`);
    for (const what of ["moved", "preempted"]) {
      const times = request.events.filter((event) => event.what === what).length;
      if (times) texts.push(`${what} ${times === 1 ? "once" : `${times} times`}`);
    }
    setAttributes(this.#chart, { "aria-label": texts.join(", ") || "just accepted" });
  }
}

const WHAT = { accepted: "accepted", started: "an engine started it", first_token: "first token", preempted: "preempted", moved: "moved to another engine", ended: "ended" };

class DetailRow {
  #facts = h("p");
  #events = h("ol", { class: "event-list" });
  element = h("tr", { class: "details-row" }, h("td", { colspan: 7 }, this.#facts, this.#events));

  update(request) {
    const cached = request.cached_tokens ? `, ${plural(request.cached_tokens, "prompt token")} cached` : "";
    setText(this.#facts, `${requestId(request.id)}: ${request.path}, ${request.model}${cached}`);
    const texts = request.events.map(({ time, what, engine }) => `${seconds(Math.max(0, time - request.times.accepted))}: ${WHAT[what] ?? what}${engine ? ` (engine ${engineName({ id: engine })})` : ""}`);
    const items = this.#events;
    while (items.children.length < texts.length) items.append(h("li"));
    while (items.children.length > texts.length) items.lastElementChild.remove();
    texts.forEach((text, index) => setText(items.children[index], text));
  }
}
