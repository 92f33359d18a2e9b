// Sample requests, so that there is something to see. They run in the background on the server: a
// browser opens only six connections to one server.

import { notify } from "./dom.js";
import { plural } from "./format.js";

const get = (id) => document.getElementById(id);
const TEXTS = ["Tell me a story.", "What is Headrace?", "Tell me a story about a river.", "How are you?", "Tell me another story.", "Good morning!"];
const OUTPUT_TOKENS = [400, 700, 1000, 1300, 550, 850];

export class SampleLoad {
  #api;
  #sent = [];

  constructor(api) {
    this.#api = api;
    get("load").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send(get("load-count").valueAsNumber || 1);
    });
    get("load-stop").addEventListener("click", () => this.#cancel());
  }

  async #send(number) {
    get("load-send").disabled = true;
    try {
      const { data } = await this.#api.json("/v1/models");
      const models = data.filter((model) => !model.parent);
      if (!models.length) throw new Error("no model is registered yet.");
      const sent = Array.from({ length: number }, (_, index) => this.#one(models[index % models.length].id, index));
      const done = await Promise.allSettled(sent);
      const failed = done.filter((result) => result.status === "rejected");
      const good = done.length - failed.length;
      notify(`${plural(good, "sample request")} sent.${failed.length ? ` ${failed.length} refused: ${failed[0].reason.message}` : ""}`);
    } catch (error) {
      notify(`Nothing was sent: ${error.message}`);
    }
    get("load-send").disabled = false;
    get("load-stop").hidden = this.#sent.length === 0;
  }

  async #one(model, index) {
    const body = {
      model,
      messages: [{ role: "user", content: TEXTS[index % TEXTS.length] }],
      max_tokens: OUTPUT_TOKENS[index % OUTPUT_TOKENS.length],
      ignore_eos: true,
      background: true,
    };
    const answer = await this.#api.json("/v1/chat/completions", { method: "POST", body });
    this.#sent.push(answer.id);
  }

  async #cancel() {
    const ids = this.#sent.splice(0);
    get("load-stop").hidden = true;
    get("load-send").focus();
    await Promise.allSettled(ids.map((id) => this.#api.send(`/v1/requests/${id}`, { method: "DELETE" })));
    notify("The sample requests are cancelled.");
  }
}
