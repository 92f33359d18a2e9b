// The moving picture of an engine's batch: one row a sequence, time runs from right to left. Each
// cell is what the engine computed for that sequence between two snapshots.
//
//   | request |  cells of the last seconds ............ now | step | prompt and output so far |

import { shortRequest } from "./format.js";

const SECONDS = 12;
// The picture is this far behind the data, so that cells glide in instead of appearing.
const BEHIND_S = 0.6;
const LABEL = 82;
const STEP = 46;
const PROGRESS = 190;
const HEAD = 22;
// A row stays empty this long after its sequence ended, so that its end can be seen.
const REST_S = 0.8;
// An engine that has made no step for this long computes nothing.
const STALLED_S = 0.8;
const ROWS = [4, 8, 16, 24, 32, 48, 64, 96, 128];
const NAMES = ["prefill", "decode", "waiting", "preempted", "text", "muted", "line", "surface"];

const height = (rows) => (rows <= 16 ? 20 : rows <= 32 ? 15 : rows <= 64 ? 10 : 7);

/** The rows of one engine: which sequence is in which, and its cells. It draws nothing. */
export class BatchRows {
  rows = [];
  #where = new Map();
  #time = null;
  #steps = null;

  /** Takes the sequences of a snapshot of Redis' time `time`, after so many steps of the engine. */
  take(time, steps, sequences) {
    // An engine's snapshots are not those of the gateway: one may come twice.
    if (steps !== null && steps === this.#steps && time - this.#time < STALLED_S) return;
    this.#steps = steps;
    const since = this.#time === null || time - this.#time > 3 ? time - 0.25 : this.#time;
    this.#time = time;
    const seen = new Set();
    for (const [key, sequence] of keyed(sequences)) {
      seen.add(key);
      const row = this.#row(key, time);
      const tokens = row.sequence ? progress(sequence) - progress(row.sequence) : sequence.step_tokens;
      row.sequence = sequence;
      row.cells.push({ from: since, to: time, state: drawn(sequence.state), tokens: Math.max(0, tokens) });
    }
    for (const [key, index] of this.#where) {
      if (seen.has(key)) continue;
      this.#where.delete(key);
      const row = this.rows[index];
      Object.assign(row, { key: null, sequence: null, freed: time });
      row.cells.at(-1).last = true;
    }
    for (const row of this.rows) {
      while (row.cells.length && row.cells[0].to < time - SECONDS - 2) row.cells.shift();
    }
  }

  /** How many rows the picture needs: up to the last one with something in it. */
  get used() {
    return this.rows.findLastIndex((row) => row.key !== null || row.cells.length) + 1;
  }

  #row(key, time) {
    let index = this.#where.get(key);
    if (index === undefined) {
      index = this.rows.findIndex((row) => row.key === null && time - row.freed >= REST_S);
      if (index < 0) index = this.rows.push({ cells: [] }) - 1;
      Object.assign(this.rows[index], { key, sequence: null });
      this.#where.set(key, index);
    }
    return this.rows[index];
  }
}

const progress = (sequence) => sequence.computed + sequence.output;
const drawn = (state) => (state === "swapped" ? "preempted" : state);

/** Sequences with keys: other tenants' have no request, but a prompt, and an order. */
function* keyed(sequences) {
  const strangers = new Map();
  for (const sequence of sequences) {
    if (sequence.request !== null) {
      yield [`${sequence.request}/${sequence.choice}`, sequence];
      continue;
    }
    const kind = `?${sequence.prompt}/${sequence.max_output}`;
    const number = strangers.get(kind) ?? 0;
    strangers.set(kind, number + 1);
    yield [`${kind}/${number}`, sequence];
  }
}

/** Colours of the page, read anew when the theme changes. */
export function palette() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

export class BatchPicture {
  #canvas;
  #context;
  #rows = new BatchRows();
  #shown = ROWS[0];
  #width = 0;
  #height = 0;
  #small = 0;
  #drawn = null;

  constructor(canvas) {
    this.#canvas = canvas;
    this.#context = canvas.getContext("2d");
    new ResizeObserver(([entry]) => {
      this.#width = Math.round(entry.contentRect.width);
      this.#resize();
    }).observe(canvas.parentElement);
  }

  take(time, steps, sequences) {
    this.#rows.take(time, steps, sequences);
    const wanted = ROWS.find((rows) => rows >= this.#rows.used) ?? ROWS.at(-1);
    // It grows at once, and shrinks only after some seconds: its surroundings shall not jump.
    this.#small = wanted < this.#shown ? this.#small + 1 : 0;
    if (wanted > this.#shown || this.#small > 24) {
      this.#shown = wanted;
      this.#small = 0;
      this.#resize();
    }
  }

  #resize() {
    const scale = devicePixelRatio;
    this.#height = HEAD + this.#shown * height(this.#shown) + 4;
    this.#canvas.width = Math.round(this.#width * scale);
    this.#canvas.height = Math.round(this.#height * scale);
    this.#canvas.style.height = `${this.#height}px`;
    this.#context.setTransform(scale, 0, 0, scale, 0, 0);
    // A new size clears the canvas, and nobody else draws a picture that is paused.
    if (this.#drawn) this.draw(...this.#drawn);
  }

  /** Draws the picture of Redis' time `now`. */
  draw(now, colours) {
    this.#drawn = [now, colours];
    const context = this.#context;
    const narrow = this.#width < 620;
    const label = LABEL;
    const right = (narrow ? 130 : PROGRESS) + STEP;
    const lane = { left: label, right: this.#width - right };
    context.clearRect(0, 0, this.#width, this.#height);
    if (lane.right - lane.left < 60) return;
    const time = { at: now - BEHIND_S, scale: (lane.right - lane.left) / SECONDS };
    this.#drawGrid(lane, time, colours, narrow);
    const size = height(this.#shown);
    this.#rows.rows.slice(0, this.#shown).forEach((row, index) => {
      const top = HEAD + index * size;
      for (const cell of row.cells) drawCell(context, cell, { ...lane, top, size }, time, colours);
      if (row.sequence) this.#drawState(row.sequence, top, size, lane, colours);
    });
  }

  #drawGrid(lane, time, colours, narrow) {
    const context = this.#context;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.fillStyle = colours.muted;
    context.textAlign = "left";
    context.fillText("request", 4, HEAD / 2);
    context.fillText(`last ${SECONDS} seconds`, lane.left + 4, HEAD / 2);
    context.textAlign = "right";
    context.fillText("step", lane.right + STEP - 8, HEAD / 2);
    context.textAlign = "left";
    context.fillText(narrow ? "output" : "prompt and output", lane.right + STEP, HEAD / 2);
    context.fillStyle = colours.line;
    for (let second = Math.floor(time.at); second > time.at - SECONDS; second--) {
      const x = Math.round(lane.right - (time.at - second) * time.scale);
      if (x >= lane.left) context.fillRect(x, HEAD, 1, this.#height - HEAD);
    }
    context.fillStyle = colours.muted;
    context.fillRect(lane.right, HEAD - 4, 1, this.#height - HEAD + 4);
  }

  #drawState(sequence, top, size, lane, colours) {
    const context = this.#context;
    const middle = top + size / 2;
    const texts = size >= 15;
    if (texts) {
      context.textAlign = "left";
      context.font = "11px ui-monospace, monospace";
      context.fillStyle = sequence.request ? colours.text : colours.muted;
      const choice = sequence.choice ? `.${sequence.choice}` : "";
      context.fillText(sequence.request ? shortRequest(sequence.request) + choice : "other", 4, middle);
      context.textAlign = "right";
      context.fillStyle = colours[drawn(sequence.state)] ?? colours.muted;
      if (sequence.step_tokens > 0) context.fillText(`+${sequence.step_tokens}`, lane.right + STEP - 8, middle);
    }
    const left = lane.right + STEP;
    const width = this.#width - left - (texts ? 62 : 4);
    const whole = sequence.prompt + sequence.max_output || 1;
    const part = (tokens) => Math.min(1, tokens / whole) * width;
    const thick = Math.max(3, Math.min(8, size - 6));
    const y = middle - thick / 2;
    context.fillStyle = colours.line;
    context.fillRect(left, y, width, thick);
    context.fillStyle = colours.prefill;
    const computed = Math.min(sequence.computed, sequence.prompt);
    context.fillRect(left, y, part(computed), thick);
    context.fillStyle = colours.decode;
    context.fillRect(left + part(sequence.prompt), y, part(sequence.output), thick);
    if (!texts) return;
    context.textAlign = "right";
    context.fillStyle = colours.muted;
    const prefilling = sequence.output === 0;
    context.fillText(prefilling ? `${computed}/${sequence.prompt}` : `${sequence.output}/${sequence.max_output}`, this.#width - 4, middle);
  }
}

/** Draws a cell: prefill fills its row, decoding most of it; waiting and preempted are lines. */
function drawCell(context, cell, lane, time, colours) {
  const from = Math.max(lane.left, lane.right - (time.at - cell.from) * time.scale);
  const to = Math.min(lane.right, lane.right - (time.at - cell.to) * time.scale);
  if (to <= from) return;
  const share = { prefill: 0.86, decode: cell.tokens > 0 ? 0.56 : 0.16, preempted: 0.3, waiting: 0.16 }[cell.state] ?? 0.16;
  const thick = Math.max(1.5, lane.size * share);
  context.fillStyle = colours[cell.state] ?? colours.muted;
  context.fillRect(from, lane.top + (lane.size - thick) / 2, Math.max(0.5, to - from - 1), thick);
  if (cell.last && to < lane.right) context.fillRect(to - 2, lane.top + 1, 2, lane.size - 2);
}
