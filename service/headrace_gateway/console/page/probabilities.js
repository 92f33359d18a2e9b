// Tokens with their probabilities. Hovering shows the alternatives; with the keyboard, the arrow
// keys move from token to token.

import { h } from "./dom.js";

// Below each of these a token is marked more strongly.
const LEVELS = [0.9, 0.6, 0.3, 0.1];

export class Probabilities {
  #entries = new WeakMap();
  #tip = document.getElementById("tooltip");
  #shown = null;

  /** Watches the tokens inside `container`. */
  constructor(container) {
    container.addEventListener("pointerover", (event) => this.#over(event.target));
    container.addEventListener("pointerleave", () => this.hide());
    container.addEventListener("focusin", (event) => this.#over(event.target));
    container.addEventListener("focusout", () => this.hide());
    container.addEventListener("keydown", (event) => this.#key(event));
    container.addEventListener("scroll", () => this.hide(), { passive: true });
  }

  token(entry, text) {
    const level = LEVELS.filter((bound) => Math.exp(entry.logprob) < bound).length;
    const token = h("span", { class: `token level-${level}`, text });
    this.#entries.set(token, entry);
    return token;
  }

  /** Makes one token of a text reachable with the tab key: its first. */
  reachable(text) {
    const token = text.querySelector(".token");
    if (!token) return;
    token.tabIndex = 0;
  }

  hide() {
    this.#tip.hidden = true;
    this.#shown?.removeAttribute("aria-describedby");
    this.#shown = null;
  }

  #over(target) {
    const entry = this.#entries.get(target);
    if (!entry) this.hide();
    else if (target !== this.#shown) this.#show(target, entry);
  }

  #key(event) {
    if (event.key === "Escape" && this.#shown) {
      this.hide();
      event.stopPropagation();
      return;
    }
    const steps = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" };
    const step = steps[event.key];
    if (!step || !this.#entries.has(event.target)) return;
    const next = event.target[step];
    if (!next || !this.#entries.has(next)) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  #show(token, entry) {
    this.hide();
    this.#shown = token;
    const others = entry.top_logprobs ?? [];
    const listed = others.some((other) => other.token === entry.token) ? others : [entry, ...others];
    this.#tip.replaceChildren(
      h("table", {}, h("tbody", {}, ...listed.map((other) => row(other, other.token === entry.token)))),
    );
    token.setAttribute("aria-describedby", "tooltip");
    this.#tip.hidden = false;
    const at = token.getBoundingClientRect();
    const size = this.#tip.getBoundingClientRect();
    const left = Math.min(Math.max(8, at.left), innerWidth - size.width - 8);
    const below = at.bottom + 6 + size.height < innerHeight;
    this.#tip.style.left = `${left}px`;
    this.#tip.style.top = `${below ? at.bottom + 6 : at.top - size.height - 6}px`;
  }
}

function row(entry, chosen) {
  const share = Math.exp(entry.logprob);
  const bar = h("meter", { min: 0, max: 1, value: share, "aria-hidden": "true" });
  bar.value = share;
  return h(
    "tr", { class: chosen ? "chosen" : "" },
    h("td", {}, h("code", { text: JSON.stringify(entry.token).slice(1, -1) })),
    h("td", { class: "number", text: `${(100 * share).toFixed(share < 0.001 ? 3 : 1)} %` }),
    h("td", {}, bar),
  );
}
