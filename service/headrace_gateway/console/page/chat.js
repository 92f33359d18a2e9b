// The view Chat: a conversation with a model, and what its request does meanwhile.

import { Answer } from "./answer.js";
import { announce, ask, h, notify, setText } from "./dom.js";
import { engineName, requestId, seconds } from "./format.js";
import { Generation } from "./generation.js";
import { InvalidField, Parameters } from "./parameters.js";
import { Pictures, shownPicture, userMessage } from "./pictures.js";
import { Probabilities } from "./probabilities.js";
import { asCurl, asPython } from "./snippets.js";

const get = (id) => document.getElementById(id);
// Within this distance of its end, the conversation follows the text.
const FOLLOW_PX = 60;

export class ChatView {
  #api;
  #feed;
  #killer;
  #parameters;
  #pictures;
  #probabilities;
  // Objects with `element` and `messages()`.
  #turns = [];
  #running = null;
  #box = get("conversation");
  #welcome;

  constructor({ api, feed, killer }) {
    this.#api = api;
    this.#feed = feed;
    this.#killer = killer;
    this.#parameters = new Parameters(api, () => this.show());
    this.#pictures = new Pictures(api, () => this.#turns.flatMap((turn) => turn.pictures ?? []));
    this.#probabilities = new Probabilities(this.#box);
    this.#welcome = welcome((text) => this.#send(text, []));
    this.#box.append(this.#welcome);
    get("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#sendDraft();
    });
    get("message").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#sendDraft();
    });
    get("view-chat").addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.#running) this.#stop();
    });
    get("stop").addEventListener("click", () => this.#stop());
    get("new-chat").addEventListener("click", () => this.#restart());
    get("show-code").addEventListener("click", () => this.#showCode());
    get("copy").addEventListener("click", () => copyCode());
    addEventListener("pagehide", () => this.#running?.generation.stop({ leaving: true }));
  }

  async show() {
    try {
      const models = await this.#parameters.loadModels();
      const none = "No model is registered yet. Start an engine, then send a message.";
      setText(this.#welcome.querySelector(".state"), models.length ? "" : none);
      await this.#pictures.offer(this.#parameters.model, this.#parameters.readsImages);
    } catch (error) {
      setText(this.#welcome.querySelector(".state"), error.message);
    }
  }

  hide() {
    this.#probabilities.hide();
  }

  #sendDraft() {
    if (this.#send(get("message").value.trim(), this.#pictures.added)) this.#pictures.clear();
  }

  /** Sends a message; returns whether it could. */
  #send(text, pictures) {
    if (!(text || pictures.length) || this.#running) return false;
    const turn = this.#userTurn(text, pictures);
    const body = this.#bodyOf([...this.#turns, turn]);
    if (!body) return false;
    get("message").value = "";
    this.#add(turn);
    this.#generate(body);
    return true;
  }

  #add(turn) {
    this.#welcome.hidden = true;
    this.#turns.push(turn);
    this.#box.append(turn.element);
    this.#offerEditing();
    this.#box.scrollTop = this.#box.scrollHeight;
  }

  #removeAfter(index) {
    for (const turn of this.#turns.splice(index)) turn.element.remove();
    this.#offerEditing();
  }

  // A person's turn

  #userTurn(text, pictures) {
    const row = pictures.length ? h("div", { class: "pictures" }, ...pictures.map(shownPicture)) : null;
    const shown = h("div", { class: "text" }, row, text);
    const edit = h("button", { type: "button", class: "quiet edit", text: "Edit", click: () => this.#edit(turn) });
    const element = h("article", { class: "turn user", "aria-label": "You" }, shown, edit);
    const turn = { element, text, pictures, edit, shown, messages: () => [userMessage(text, pictures)] };
    return turn;
  }

  /** Only the last message can be edited: what follows it is written anew. */
  #offerEditing() {
    const last = this.#turns.findLast((turn) => turn.edit);
    for (const turn of this.#turns) if (turn.edit) turn.edit.hidden = turn !== last || this.#running !== null;
  }

  #edit(turn) {
    const input = h("textarea", { rows: 3, "aria-label": "Your message", value: turn.text });
    const cancel = () => {
      form.replaceWith(turn.shown);
      turn.edit.hidden = false;
      turn.edit.focus();
    };
    const form = h(
      "form",
      {
        class: "edit-form",
        submit: (event) => {
          event.preventDefault();
          const text = input.value.trim();
          if (!(text || turn.pictures.length) || this.#running) return;
          this.#removeAfter(this.#turns.indexOf(turn));
          this.#send(text, turn.pictures);
          get("message").focus();
        },
        keydown: (event) => {
          if (event.key === "Escape") cancel();
          else if (event.key === "Enter" && !event.shiftKey) {
            event.preventDefault();
            form.requestSubmit();
          }
        },
      },
      input,
      h("div", { class: "row" },
        h("button", { type: "submit", class: "primary", text: "Send again" }),
        h("button", { type: "button", text: "Cancel", click: cancel })),
    );
    turn.edit.hidden = true;
    turn.shown.replaceWith(form);
    input.focus();
  }

  // The model's turn

  async #generate(body) {
    const answer = new Answer(body.n ?? 1, this.#probabilities);
    const turn = { element: answer.element, answer, messages: () => answer.messages() };
    const generation = new Generation(this.#api, body, (text) => answer.say(text));
    const run = (this.#running = { generation, answer, whereabouts: new Whereabouts(generation, answer, this.#killer) });
    this.#showRunning(true);
    this.#add(turn);
    this.#feed.watch(run.whereabouts);
    try {
      for await (const chunk of generation.chunks()) {
        const follow = this.#box.scrollHeight - this.#box.scrollTop - this.#box.clientHeight < FOLLOW_PX;
        answer.take(chunk);
        run.whereabouts.tick();
        if (follow) this.#box.scrollTop = this.#box.scrollHeight;
      }
      answer.say(null);
      answer.end({ stopped: generation.stopped });
      if (!generation.stopped) run.whereabouts.complete();
      announce(generation.stopped ? "Stopped." : answer.summary);
    } catch (error) {
      answer.fail(error.message);
      announce(error.message);
    } finally {
      this.#feed.unwatch(run.whereabouts);
      run.whereabouts.close();
      this.#running = null;
      this.#showRunning(false);
      this.#offerActions(turn);
      this.#offerEditing();
      this.#box.scrollTop = this.#box.scrollHeight;
    }
  }

  #offerActions(turn) {
    const { answer } = turn;
    for (const text of answer.element.querySelectorAll(".text")) this.#probabilities.reachable(text);
    for (const old of this.#box.querySelectorAll(".regenerate")) old.remove();
    const copyText = () => copy(answer.text, "Copied the answer.");
    if (answer.text) answer.actions.append(h("button", { type: "button", class: "quiet", text: "Copy", click: copyText }));
    answer.actions.append(
      h("button", { type: "button", class: "quiet regenerate", text: "Regenerate", click: () => this.#regenerate(turn) }),
    );
    if (answer.choice.toolCalls.length && answer.choice.finishReason) this.#askForResults(turn);
  }

  #regenerate(turn) {
    const index = this.#turns.indexOf(turn);
    if (this.#running || index < 0) return;
    const body = this.#bodyOf(this.#turns.slice(0, index));
    if (!body) return;
    this.#removeAfter(index);
    this.#generate(body);
    get("stop").focus();
  }

  #bodyOf(turns) {
    try {
      return this.#parameters.body(turns.flatMap((turn) => turn.messages()));
    } catch (error) {
      if (!(error instanceof InvalidField)) throw error;
      notify(error.message);
      return null;
    }
  }

  /** The server runs no tools: the person writes what a tool would return. */
  #askForResults({ answer }) {
    const inputs = answer.choice.toolCalls.map((call) => ({
      call,
      input: h("textarea", { rows: 2, class: "code", placeholder: '{"result": …}' }),
    }));
    const form = h(
      "form",
      {
        class: "fields",
        submit: (event) => {
          event.preventDefault();
          if (this.#running) return;
          const messages = inputs.map(({ call, input }) => ({ role: "tool", tool_call_id: call.id, content: input.value }));
          const texts = inputs.map(({ call, input }) => `${call.function.name}: ${input.value}`);
          const element = h("article", { class: "turn tool", "aria-label": "Results of tools" }, h("pre", { class: "code", text: texts.join("\n") }));
          const turn = { element, messages: () => messages };
          const body = this.#bodyOf([...this.#turns, turn]);
          if (!body) return;
          form.remove();
          this.#add(turn);
          this.#generate(body);
        },
      },
      ...inputs.map(({ call, input }) => h("label", {}, `Result of ${call.function.name}`, input)),
      h("div", { class: "row" }, h("button", { type: "submit", text: inputs.length > 1 ? "Send results" : "Send result" })),
    );
    answer.results.replaceChildren(form);
  }

  #stop() {
    if (!this.#running) return;
    this.#running.generation.stop();
    get("message").focus();
  }

  #restart() {
    if (this.#running) this.#stop();
    this.#removeAfter(0);
    this.#pictures.clear();
    this.#welcome.hidden = false;
    get("message").focus();
  }

  #showRunning(running) {
    const hadFocus = document.activeElement === get("stop");
    get("stop").hidden = !running;
    get("send").disabled = running;
    if (!running && hadFocus) get("message").focus();
  }

  // As code

  async #showCode() {
    const draft = get("message").value.trim();
    const { added } = this.#pictures;
    const drafted = draft || added.length;
    let turns = this.#turns;
    if (drafted) turns = [...turns, this.#userTurn(draft, added)];
    else if (this.#running || turns.at(-1)?.answer) turns = turns.slice(0, -1);
    if (!turns.length) turns = [this.#userTurn("Hello!", [])];
    const body = this.#bodyOf(turns);
    if (!body) return;
    body.stream = true;
    const dialog = get("code-dialog");
    const fill = () => {
      const python = dialog.querySelector("input:checked").value === "python";
      get("code-text").value = (python ? asPython : asCurl)(location.origin, body);
      setText(get("copied"), "");
    };
    for (const radio of dialog.querySelectorAll("input")) radio.onchange = fill;
    fill();
    await ask(dialog);
    get("show-code").focus();
  }
}

function welcome(send) {
  const suggestions = ["What is Headrace?", "Tell me a story.", "Hello!"];
  return h(
    "div", { class: "welcome" },
    h("p", { class: "big", text: "Ask the model something." }),
    h("p", { class: "muted state" }),
    h("div", { class: "row center" }, ...suggestions.map((text) => h("button", { type: "button", text, click: () => send(text) }))),
  );
}

/** Where the request of an answer runs, from the live data; and how its stream went on after a kill. */
class Whereabouts {
  #generation;
  #answer;
  #killer;
  #engine = null;
  #killed = null;
  #last = null;
  #longest = 0;
  #text = h("span");
  #button = h("button", { type: "button", class: "danger small", hidden: true });
  #strip;

  constructor(generation, answer, killer) {
    this.#generation = generation;
    this.#answer = answer;
    this.#killer = killer;
    this.#strip = h("p", { class: "whereabouts", hidden: true }, this.#text, this.#button);
    this.#button.addEventListener("click", () => this.#kill());
    answer.element.append(this.#strip);
  }

  snapshot({ console: rights, engines }) {
    const id = this.#generation.id;
    const own = (engine) => engine.sequences?.filter((sequence) => id !== null && sequence.request !== null && requestId(sequence.request) === id) ?? [];
    const found = engines.filter((engine) => engine.state !== "silent" && engine.id !== this.#killed?.id).find((engine) => own(engine).length);
    if (!found) return;
    if (this.#killed && found.id !== this.#killed.id) this.#moved(found);
    this.#engine = found;
    const states = new Set(own(found).map((sequence) => sequence.state));
    setText(this.#text, `${[...states].join(", ")} on ${engineName(found)}`);
    setText(this.#button, `Kill ${engineName(found)}`);
    this.#button.hidden = !rights.kill;
    this.#strip.hidden = false;
  }

  /** A token has come. */
  tick() {
    const now = performance.now();
    if (this.#killed && this.#last !== null) {
      this.#longest = Math.max(this.#longest, now - Math.max(this.#last, this.#killed.at));
      this.#tell();
    }
    this.#last = now;
  }

  complete() {
    if (this.#killed) this.#tell(", and no token was lost");
  }

  close() {
    this.#strip.remove();
  }

  #moved(engine) {
    this.#killed.next = engineName(engine);
    this.#tell();
  }

  #tell(end = "") {
    const { name, next } = this.#killed;
    const where = next ? `, ${next} went on` : "";
    const pause = this.#longest > 0 ? `: longest pause ${seconds(this.#longest / 1000)}` : "";
    this.#answer.note(`${name} was killed${where}${pause}${end}`);
  }

  async #kill() {
    const engine = this.#engine;
    if (!(await this.#killer.kill(engine))) return;
    this.#killed = { id: engine.id, name: engineName(engine), at: performance.now(), next: null };
    setText(this.#text, `${engineName(engine)} was killed: another engine takes the request over…`);
    this.#button.hidden = true;
  }
}

async function copy(text, message) {
  try {
    await navigator.clipboard.writeText(text);
    notify(message);
    return true;
  } catch {
    return false; // browsers have a clipboard only for pages from https or this machine
  }
}

async function copyCode() {
  const text = get("code-text");
  if (await copy(text.value, "Copied the code.")) setText(get("copied"), "Copied.");
  else {
    text.select();
    setText(get("copied"), "Press Ctrl+C to copy.");
  }
}
