// The view Live: the queues, the engines with their batches, and what happened.

import { BatchPicture, palette } from "./batch.js";
import { changes } from "./changes.js";
import { KeyedList, h, setAttributes, setText, svg } from "./dom.js";
import { clockTime, count, engineName, plural, rate, seconds, shortRequest } from "./format.js";
import { SampleLoad } from "./load.js";

const get = (id) => document.getElementById(id);
const HISTORY = 240;
const MOST_LINES = 50;
const STATE_TEXT = { hung: "hangs" };
// An engine that is gone is shown for this long, or until its successor is there.
const GONE_S = 60;
const NO_DETAIL = { steps: null, step_seconds: 0, output_tokens_per_s: 0, prompt_tokens_per_s: 0, running: 0, waiting: 0, preemptions: 0, kv: { total: 0, used: 0, shared: 0, cached: 0, free: 0, block_tokens: 0 }, sequences: [], sequences_left_out: 0 };

export class LiveView {
  #feed;
  #before = null;
  #gone = new Map();
  #models = new KeyedList(get("models"), (model) => model.name, () => new ModelCard());
  #engines;
  #clock = null;
  #paused = false;
  #frame = null;
  #colours = palette();
  #still = matchMedia("(prefers-reduced-motion: reduce)");

  constructor({ api, feed, killer }) {
    this.#feed = feed;
    this.#engines = new KeyedList(get("engines"), place, () => new EngineCard(killer));
    new SampleLoad(api);
    get("pause").addEventListener("click", () => this.#pause(!this.#paused));
    new MutationObserver(() => (this.#colours = palette())).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  }

  show() {
    this.#feed.watch(this);
    this.#animate();
  }

  hide() {
    this.#feed.unwatch(this);
    if (this.#frame !== null) cancelAnimationFrame(this.#frame);
    this.#frame = null;
    this.#before = null;
  }

  state(text) {
    setText(get("live-state"), text ?? "");
  }

  snapshot(snapshot) {
    for (const text of changes(this.#before, snapshot)) tell(snapshot.time, text);
    this.#before = snapshot;
    if (snapshot.stale) this.state("Redis does not answer: these are the last data.");
    const offset = snapshot.time - performance.now() / 1000;
    // The largest offset is that of the snapshot that came fastest; it may drift.
    this.#clock = this.#clock === null ? offset : Math.max(offset, this.#clock - 0.002);
    if (offset < this.#clock - 2) this.#clock = offset;
    this.#models.update(snapshot.models);
    get("no-models").hidden = snapshot.models.length > 0;
    const engines = this.#withGone(snapshot).toSorted((one, other) => engineName(one).localeCompare(engineName(other), "en", { numeric: true }));
    this.#engines.update(engines.map((engine) => ({ ...engine, time: snapshot.time, mayKill: snapshot.console.kill, frozen: this.#paused })));
    get("no-engines").hidden = engines.length > 0;
    if (this.#still.matches && !this.#paused) this.#draw(snapshot.time + 0.5);
  }

  /** The engines of a snapshot, one for each place, and those that were there until lately. */
  #withGone({ engines, time }) {
    const found = new Map();
    for (const engine of engines) {
      const other = found.get(place(engine));
      if (!other || other.state === "silent") found.set(place(engine), engine);
    }
    for (const [where, { engine, until }] of this.#gone) {
      if (found.has(where) || until < time) this.#gone.delete(where);
      else found.set(where, { ...NO_DETAIL, id: engine.id, name: engine.name, model: engine.model, state: "gone", age: 0, detail: false });
    }
    for (const [where, engine] of found) {
      if (engine.state !== "gone") this.#gone.set(where, { engine, until: time + GONE_S });
    }
    return [...found.values()];
  }

  #pause(paused) {
    this.#paused = paused;
    get("pause").setAttribute("aria-pressed", String(paused));
    this.#animate();
  }

  #animate() {
    if (this.#frame !== null) cancelAnimationFrame(this.#frame);
    this.#frame = null;
    if (this.#paused || this.#still.matches) return;
    const step = () => {
      this.#frame = requestAnimationFrame(step);
      if (this.#clock !== null) this.#draw(this.#clock + performance.now() / 1000);
    };
    this.#frame = requestAnimationFrame(step);
  }

  #draw(now) {
    for (const card of this.#engines.parts) card.draw(now, this.#colours);
  }
}

/** Where an engine runs: one that is started again has its predecessor's name on the same host. */
function place({ id, name }) {
  return name ? `${id.split(".").slice(0, -2).join(".")}/${name}` : id;
}

/** Adds a line to what happened; the same sentence again counts. */
function tell(time, text) {
  const list = get("happened");
  const last = list.firstElementChild;
  if (last?.dataset.text === text) {
    last.dataset.times = Number(last.dataset.times) + 1;
    setText(last.querySelector(".times"), ` (${last.dataset.times} times)`);
    return;
  }
  const line = h("p", { "data-text": text, "data-times": 1 }, h("time", { text: clockTime(time) }), text, h("span", { class: "times muted" }));
  list.prepend(line);
  while (list.children.length > MOST_LINES) list.lastElementChild.remove();
}

/** A queue: how many requests wait and run, their history, and the wanted replicas. */
class ModelCard {
  #history = [];
  #running = svg("polyline", { class: "running-line" });
  #waiting = svg("polyline", { class: "waiting-line" });
  #chart = svg("svg", { viewBox: `0 0 ${HISTORY} 44`, preserveAspectRatio: "none", class: "history", role: "img" }, this.#waiting, this.#running);
  #name = h("h3");
  #figures = { waiting: h("dd"), running: h("dd"), oldest_wait: h("dd"), waiting_tokens: h("dd") };
  #scaling = h("p", { class: "scaling", hidden: true });
  #starts = h("p", { class: "scaling", hidden: true });
  #limit = h("p", { class: "muted small-text" });

  constructor() {
    const figures = [
      ["waiting", this.#figures.waiting],
      ["running", this.#figures.running],
      ["oldest wait", this.#figures.oldest_wait],
      ["waiting tokens", this.#figures.waiting_tokens],
    ];
    this.element = h(
      "article", { class: "card model" },
      h(
        "div", {},
        this.#name,
        h("dl", { class: "figures-grid" }, ...figures.map(([term, figure]) => h("div", {}, h("dt", { text: term }), figure))),
        this.#scaling,
        this.#starts,
      ),
      h("div", {}, this.#chart, this.#limit),
    );
  }

  update(model) {
    setText(this.#name, model.name);
    setText(this.#figures.waiting, count(model.waiting));
    setText(this.#figures.running, count(model.running));
    setText(this.#figures.oldest_wait, model.waiting ? seconds(model.oldest_wait) : "none");
    setText(this.#figures.waiting_tokens, count(model.waiting_tokens));
    setText(this.#limit, `last minute: running (line), waiting (dashes); at most ${count(model.limit_requests)} wait`);
    this.#draw(model);
    const { scaling, starts } = model;
    this.#starts.hidden = !starts.length;
    setText(this.#starts, `Starting: ${starts.map((start) => `${engineName(start)} (${start.phase}, ${seconds(start.seconds)})`).join(", ")}.`);
    this.#scaling.hidden = !scaling;
    if (scaling) setText(this.#scaling, `${plural(scaling.desired, "replica")} wanted, ${count(scaling.ready)} ready: ${scaling.reason}. ${scaling.message}`);
  }

  #draw({ waiting, running }) {
    this.#history.push({ waiting, running });
    if (this.#history.length > HISTORY) this.#history.shift();
    const most = Math.max(4, ...this.#history.map((point) => Math.max(point.waiting, point.running)));
    const start = HISTORY - this.#history.length;
    const points = (name) => this.#history.map((point, index) => `${start + index},${(42 - (40 * point[name]) / most).toFixed(1)}`).join(" ");
    setAttributes(this.#running, { points: points("running") });
    setAttributes(this.#waiting, { points: points("waiting") });
    setAttributes(this.#chart, { "aria-label": `Up to ${most} requests in the last minute; now ${running} run and ${waiting} wait.` });
  }
}

const KV_PARTS = ["shared", "own", "cached", "free"];
const FIGURES = [
  ["tokens/s out", (engine) => rate(engine.output_tokens_per_s)],
  ["tokens/s in", (engine) => rate(engine.prompt_tokens_per_s)],
  ["step", (engine) => (engine.step_seconds > 0 ? seconds(engine.step_seconds) : "–")],
  ["running", (engine) => count(engine.running)],
  ["waiting", (engine) => count(engine.waiting)],
  ["preemptions", (engine) => count(engine.preemptions)],
];

/** An engine: its state, its KV blocks, the moving picture of its batch, and the same as a table. */
class EngineCard {
  #engine = null;
  #name = h("h3");
  #badge = h("span", { class: "badge" });
  #model = h("span", { class: "muted" });
  #kill = h("button", { type: "button", class: "danger small", hidden: true });
  #figures = FIGURES.map(() => h("dd"));
  #kv = new KvBar();
  #canvas = h("canvas", { role: "img" });
  #picture;
  #detail;
  #none = h("p", { class: "muted", text: "This engine sends no details yet." });
  #table = new SequenceTable();
  #describe = 0;
  #known = false;

  constructor(killer) {
    this.#kill.addEventListener("click", () => killer.kill(this.#engine));
    const figures = FIGURES.map(([term], index) => h("div", {}, h("dt", { text: term }), this.#figures[index]));
    this.#detail = h(
      "div", {},
      h("dl", { class: "figures-grid" }, ...figures),
      this.#kv.element,
      h("div", { class: "picture" }, this.#canvas),
      this.#table.element,
    );
    this.element = h(
      "article", { class: "card engine" },
      h("div", { class: "row" }, this.#name, this.#badge, this.#model, h("span", { class: "space" }), this.#kill),
      this.#none,
      this.#detail,
    );
    this.#picture = new BatchPicture(this.#canvas);
  }

  update(engine) {
    this.#engine = engine;
    const name = engineName(engine);
    setText(this.#name, name);
    setText(this.#badge, STATE_TEXT[engine.state] ?? engine.state);
    setAttributes(this.#badge, { class: `badge ${engine.state}` });
    setText(this.#model, engine.age > 2 ? `${engine.model}, last word ${seconds(engine.age)} ago` : engine.model);
    setText(this.#kill, `Kill ${name}`);
    this.#kill.hidden = !engine.mayKill;
    this.#kill.disabled = engine.state === "silent" || engine.state === "gone";
    this.#known ||= engine.detail;
    this.#detail.hidden = !this.#known;
    this.#none.hidden = this.#known;
    if (this.#known) this.#showDetail(engine.detail ? engine : { ...engine, ...NO_DETAIL });
  }

  #showDetail(engine) {
    FIGURES.forEach(([, text], index) => setText(this.#figures[index], engine.detail ? text(engine) : "–"));
    this.#kv.update(engine.kv);
    if (!engine.frozen) this.#picture.take(engine.time, engine.steps, engine.sequences);
    this.#table.update(engine);
    // Screen readers read a label again when it changes, so it changes seldom.
    if (this.#describe++ % 20 === 0) {
      const prefilling = engine.sequences.filter((sequence) => sequence.state === "prefill").length;
      setAttributes(this.#canvas, { "aria-label": `Batch of ${engineName(engine)}: ${plural(engine.running, "sequence")}, ${prefilling} in prefill. The table below has the same data.` });
    }
  }

  draw(now, colours) {
    if (!this.#detail.hidden) this.#picture.draw(now, colours);
  }
}

class KvBar {
  #parts = Object.fromEntries(KV_PARTS.map((name) => [name, svg("rect", { class: `kv-${name}`, y: 0, height: 14 })]));
  #bar = svg("svg", { class: "kv", viewBox: "0 0 1000 14", preserveAspectRatio: "none", role: "img" }, ...Object.values(this.#parts));
  #texts = Object.fromEntries(KV_PARTS.map((name) => [name, h("span")]));
  #title = h("span", { class: "muted" });

  constructor() {
    const keys = KV_PARTS.map((name) => h("li", {}, h("i", { class: `mark kv-${name}` }), this.#texts[name]));
    this.element = h("div", { class: "kv-part" }, this.#bar, h("ul", { class: "legend" }, ...keys, h("li", {}, this.#title)));
  }

  update({ total, used, shared, cached, free, block_tokens }) {
    const blocks = { shared, own: used - shared, cached, free };
    let left = 0;
    for (const name of KV_PARTS) {
      const width = total > 0 ? (1000 * blocks[name]) / total : 0;
      // Whatever is not empty can be seen.
      const seen = blocks[name] > 0 ? Math.max(width, 3) : 0;
      setAttributes(this.#parts[name], { x: left.toFixed(1), width: seen.toFixed(1) });
      left += seen;
    }
    setText(this.#texts.shared, `${count(shared)} shared`);
    setText(this.#texts.own, `${count(blocks.own)} used by one`);
    setText(this.#texts.cached, `${count(cached)} cached`);
    setText(this.#texts.free, `${count(free)} free`);
    setText(this.#title, total ? `of ${count(total)} KV blocks of ${block_tokens} tokens` : "of its KV blocks");
    setAttributes(this.#bar, { "aria-label": `KV blocks: ${count(used)} used, of them ${count(shared)} shared; ${count(cached)} cached, ${count(free)} free.` });
  }
}

class SequenceTable {
  #summary = h("summary");
  #body = h("tbody");
  #rows = new KeyedList(this.#body, (sequence) => sequence.key, () => new SequenceRow());
  #frame;

  constructor() {
    const heads = ["Request", "State", "Prompt", "Computed", "Output", "At most", "Last step"];
    const head = h("thead", {}, h("tr", {}, ...heads.map((text, index) => h("th", { scope: "col", class: index > 1 ? "number" : "", text }))));
    this.#frame = h("div", { class: "table-frame", tabindex: 0, role: "region" }, h("table", {}, head, this.#body));
    this.element = h("details", { class: "sequences" }, this.#summary, this.#frame);
  }

  update(engine) {
    const { sequences, sequences_left_out: more } = engine;
    setText(this.#summary, `${plural(sequences.length, "sequence")} as a table`);
    setAttributes(this.#frame, { "aria-label": `Sequences of ${engineName(engine)}` });
    if (!this.element.open) return;
    this.#rows.update(sequences.map((sequence, index) => ({ ...sequence, key: sequence.request ? `${sequence.request}/${sequence.choice}` : index })));
    if (more) setText(this.#summary, `${plural(sequences.length, "sequence")} as a table; ${count(more)} more are not shown`);
  }
}

class SequenceRow {
  #cells = Array.from({ length: 7 }, (_, index) => h("td", { class: index > 1 ? "number" : "" }));
  element = h("tr", {}, ...this.#cells);

  update({ request, choice, state, prompt, computed, output, max_output, step_tokens }) {
    const name = request ? shortRequest(request) + (choice ? `.${choice}` : "") : "another tenant’s";
    [name, state, prompt, computed, output, max_output, step_tokens].forEach((value, index) => setText(this.#cells[index], value));
  }
}

