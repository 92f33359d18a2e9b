// The form of parameters: it makes the body of a request, and says what is wrong with a field.

import { h, setText } from "./dom.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed", "n"];
const EXAMPLE_TOOL = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather of a city now.",
      parameters: {
        type: "object",
        properties: { city: { type: "string" } },
        required: ["city"],
      },
    },
  },
];

const field = (name) => document.getElementById(`p-${name}`);

/** A field cannot be used. The form shows why. */
export class InvalidField extends Error {}

export class Parameters {
  #api;
  #models = [];

  /** `onModel()` is called when another model is chosen. */
  constructor(api, onModel) {
    this.#api = api;
    field("model").addEventListener("change", onModel);
    document.getElementById("example-tool").addEventListener("click", () => {
      field("tools").value = JSON.stringify(EXAMPLE_TOOL, null, 2);
      this.#json("tools");
    });
    for (const name of ["tools", "extra"]) field(name).addEventListener("change", () => this.#json(name));
    document.getElementById("parameter-form").addEventListener("submit", (event) => event.preventDefault());
    if (matchMedia("(max-width: 60rem)").matches) document.getElementById("parameters").open = false;
  }

  get model() {
    return field("model").value;
  }

  /** Whether the chosen model reads images. */
  get readsImages() {
    const chosen = this.#models.find((model) => model.id === this.model);
    return chosen?.architecture.input_modalities.includes("image") ?? false;
  }

  /** Fills the list of models; keeps the chosen one. */
  async loadModels() {
    const { data } = await this.#api.json("/v1/models");
    this.#models = data;
    const select = field("model");
    const names = data.map((model) => model.id);
    const shown = [...select.options].map((option) => option.value);
    if (names.join("\n") === shown.join("\n")) return names;
    const chosen = select.value;
    select.replaceChildren(...names.map((name) => h("option", { text: name })));
    if (names.includes(chosen)) select.value = chosen;
    return names;
  }

  /** The body of a request with these messages. Raises InvalidField, with the focus on the field. */
  body(messages) {
    const body = { model: this.model };
    const system = field("system").value.trim();
    body.messages = system ? [{ role: "system", content: system }, ...messages] : messages;
    for (const name of NUMBERS) {
      const input = field(name);
      if (!input.checkValidity()) this.#refuse(input, `${name}: ${input.validationMessage}`);
      if (input.value !== "") body[name] = input.valueAsNumber;
    }
    if (body.n === 1) delete body.n;
    if (field("logprobs").checked) {
      body.logprobs = true;
      body.top_logprobs = field("top_logprobs").valueAsNumber || 0;
    }
    const tools = this.#json("tools", { required: true });
    if (tools !== null) body.tools = tools;
    return { ...body, ...this.#json("extra", { required: true }) };
  }

  /** The value of a JSON field, null if it is empty. */
  #json(name, { required = false } = {}) {
    const input = field(name);
    const text = input.value.trim();
    let value = null;
    let fault = "";
    if (text) {
      try {
        value = JSON.parse(text);
        if (name === "tools" && !Array.isArray(value)) fault = "This is not a JSON list: begin with [.";
        if (name === "extra" && (typeof value !== "object" || value === null || Array.isArray(value)))
          fault = "This is not a JSON object: begin with {.";
      } catch (error) {
        fault = `This is not JSON: ${error.message}.`;
      }
    }
    setText(document.getElementById(`e-${name}`), fault);
    if (fault) input.setAttribute("aria-invalid", "true");
    else input.removeAttribute("aria-invalid");
    if (fault && required) this.#refuse(input, fault);
    return fault ? null : value;
  }

  #refuse(input, message) {
    for (let part = input.closest("details"); part; part = part.parentElement.closest("details")) part.open = true;
    input.focus();
    throw new InvalidField(message);
  }
}
