// One answer in the conversation: its choices side by side, each with reasoning, text, tool calls
// and the figures of its stream. Text is appended as it comes; nothing is drawn twice.

import { h, setText } from "./dom.js";
import { count, plural, rate, seconds } from "./format.js";

/** Texts of `logprobs` entries as characters: a character may have several tokens. */
class TokenText {
  #decoder = new TextDecoder();

  of(entry) {
    if (!entry.bytes) return entry.token;
    return this.#decoder.decode(new Uint8Array(entry.bytes), { stream: true });
  }
}

class Choice {
  content = "";
  reasoning = "";
  toolCalls = [];
  finishReason = null;
  #callParts = [];
  #tokens = new TokenText();
  #probabilities;

  constructor(index, several, probabilities) {
    this.#probabilities = probabilities;
    this.text = h("div", { class: "text" });
    this.reasoningText = h("div", { class: "text reasoning-text" });
    this.reasoningSummary = h("summary", { text: "Reasoning…" });
    this.reasoningPart = h("details", { class: "reasoning", hidden: true }, this.reasoningSummary, this.reasoningText);
    this.calls = h("div", { class: "calls" });
    this.end = h("p", { class: "finish muted" });
    const name = several ? h("p", { class: "choice-name", text: `Choice ${index + 1}` }) : null;
    this.element = h("div", { class: "choice" }, name, this.reasoningPart, this.text, this.calls, this.end);
  }

  take(choice) {
    const delta = choice.delta ?? {};
    const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
    if (reasoning) {
      this.reasoning += reasoning;
      this.reasoningPart.hidden = false;
      this.reasoningText.append(reasoning);
    }
    if (delta.content) {
      if (this.reasoning && !this.content) setText(this.reasoningSummary, "Reasoning");
      this.content += delta.content;
      this.#append(delta.content, choice.logprobs?.content ?? []);
    }
    for (const call of delta.tool_calls ?? []) this.#takeCall(call);
    if (choice.finish_reason) this.#finish(choice.finish_reason);
    return Boolean(reasoning || delta.content || delta.tool_calls?.length);
  }

  #append(content, entries) {
    const texts = entries.map((entry) => this.#tokens.of(entry));
    if (!entries.length || texts.join("") !== content) {
      this.#appendText(content);
      return;
    }
    entries.forEach((entry, number) => {
      if (texts[number]) this.text.append(this.#probabilities.token(entry, texts[number]));
    });
  }

  #appendText(content) {
    const last = this.text.lastChild;
    if (last?.nodeType === Node.TEXT_NODE) last.appendData(content);
    else this.text.append(content);
  }

  #takeCall(part) {
    const number = part.index ?? 0;
    const call = (this.toolCalls[number] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    if (part.id) call.id = part.id;
    call.function.name += part.function?.name ?? "";
    call.function.arguments += part.function?.arguments ?? "";
    const shown = (this.#callParts[number] ??= this.#newCall());
    setText(shown.name, call.function.name);
    setText(shown.given, call.function.arguments);
  }

  #newCall() {
    const name = h("strong");
    const given = h("pre", { class: "code" });
    this.calls.append(h("div", { class: "call" }, h("p", {}, "Call of ", name), given));
    return { name, given };
  }

  #finish(reason) {
    this.finishReason = reason;
    if (this.reasoning) setText(this.reasoningSummary, "Reasoning");
    this.#callParts.forEach(({ given }) => setText(given, indented(given.textContent)));
    const notes = { length: "It ends here because max_tokens was reached.", content_filter: "It was cut off." };
    setText(this.end, notes[reason] ?? "");
  }
}

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

export class Answer {
  #choices = [];
  #started = performance.now();
  #first = null;
  #last = null;
  #events = 0;
  #usage = null;
  #note = "";
  #failed = false;
  #several;
  #probabilities;
  chosen = 0;

  /** `several`: how many choices were requested. `onChoose()` is called when another is chosen. */
  constructor(several, probabilities) {
    this.#several = several;
    this.#probabilities = probabilities;
    this.columns = h("div", { class: several > 1 ? "choices" : "single-choice" });
    this.notice = h("p", { class: "notice", hidden: true, role: "status" });
    this.figures = h("p", { class: "figures muted" });
    this.actions = h("div", { class: "row actions" });
    this.results = h("div", { class: "results" });
    this.element = h(
      "article", { class: "turn answer", "aria-label": "Answer", "aria-busy": "true" },
      this.columns, this.notice, this.results, h("div", { class: "row foot" }, this.figures, h("span", { class: "space" }), this.actions),
    );
    this.#choice(0);
    setText(this.figures, "Waiting for the first token…");
  }

  get choice() {
    return this.#choices[this.chosen];
  }

  get text() {
    return this.choice.content;
  }

  /** The message of the chosen choice, for the next request; none if the request failed. */
  messages() {
    if (this.#failed && !this.text) return [];
    const { content, toolCalls, reasoning } = this.choice;
    const message = { role: "assistant", content: content || (toolCalls.length ? null : "") };
    if (toolCalls.length) message.tool_calls = toolCalls;
    if (reasoning) message.reasoning_content = reasoning;
    return [message];
  }

  take(chunk) {
    if (chunk.usage) this.#usage = chunk.usage;
    for (const choice of chunk.choices ?? []) {
      if (!this.#choice(choice.index).take(choice)) continue;
      this.#last = performance.now();
      this.#first ??= this.#last;
      this.#events += 1;
    }
    this.#showFigures();
  }

  /** Shows a passing state of the stream; null removes it. */
  say(text) {
    this.notice.hidden = text === null;
    this.notice.classList.remove("bad");
    if (text !== null) setText(this.notice, text);
  }

  /** Adds a lasting sentence to the figures. */
  note(text) {
    this.#note = text;
    this.#showFigures();
  }

  fail(message) {
    this.#failed = true;
    this.columns.hidden = this.#first === null;
    this.say(message);
    this.notice.classList.add("bad");
    this.end();
  }

  end({ stopped = false } = {}) {
    this.element.setAttribute("aria-busy", "false");
    this.#showFigures(stopped ? "stopped" : "");
  }

  get summary() {
    return `Answer complete: ${plural(this.#tokens, "token")}.`;
  }

  get #tokens() {
    return this.#usage?.completion_tokens ?? this.#events;
  }

  #choice(index) {
    while (this.#choices.length <= index) {
      const number = this.#choices.length;
      const choice = new Choice(number, this.#several > 1, this.#probabilities);
      this.#choices.push(choice);
      if (this.#several > 1) choice.element.append(this.#chooser(number));
      this.columns.append(choice.element);
    }
    return this.#choices[index];
  }

  #chooser(number) {
    const name = `choice-${this.#started}`;
    const radio = h("input", { type: "radio", name, change: () => (this.chosen = number) });
    radio.checked = number === 0;
    return h("label", { class: "radio" }, radio, "Go on with this one");
  }

  #showFigures(end = "") {
    const parts = [];
    if (this.#first !== null) {
      parts.push(`first token after ${seconds((this.#first - this.#started) / 1000)}`);
      const spent = (this.#last - this.#first) / 1000;
      if (this.#tokens > 1 && spent > 0) parts.push(`${rate((this.#tokens - 1) / spent)} tokens/s`);
      parts.push(plural(this.#tokens, "token"));
    } else if (this.element.getAttribute("aria-busy") === "true") return;
    const usage = this.#usage;
    if (usage) {
      const cached = usage.prompt_tokens_details?.cached_tokens;
      parts.push(`prompt ${count(usage.prompt_tokens)}${cached ? ` (${count(cached)} cached)` : ""}`);
      const thought = usage.completion_tokens_details?.reasoning_tokens;
      if (thought) parts.push(`${count(thought)} of reasoning`);
    }
    if (end) parts.push(end);
    if (this.#note) parts.push(this.#note);
    setText(this.figures, parts.join(" · "));
  }
}
