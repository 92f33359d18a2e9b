// Kills an engine, after the person has confirmed it. Only `headrace up` allows this.

import { ask, notify, setText } from "./dom.js";
import { engineName } from "./format.js";

const get = (id) => document.getElementById(id);

export class Killer {
  #api;

  constructor(api) {
    this.#api = api;
  }

  /** Whether the engine was killed. The focus returns to where it was. */
  async kill(engine) {
    const name = engineName(engine);
    const back = document.activeElement;
    setText(get("kill-title"), `Kill ${name}?`);
    setText(
      get("kill-text"),
      `Its process gets SIGKILL now. Other engines go on with its requests at the token that they have reached; their clients see a pause. The process is started again.`,
    );
    setText(get("kill-confirm"), `Kill ${name}`);
    const answer = await ask(get("kill-dialog"));
    if (back?.isConnected) back.focus();
    if (answer !== "kill") return false;
    try {
      await this.#api.send(`/console/engines/${encodeURIComponent(engine.id)}/kill`, {
        method: "POST",
        headers: { "x-headrace-console": "1" },
      });
      notify(`${name} was killed.`);
      return true;
    } catch (error) {
      notify(`${name} was not killed: ${error.message}`);
      return false;
    }
  }
}
