// HTTP to the gateway that served this page. The API key, if one is needed, is only in
// sessionStorage: it is gone when the tab is closed.

const KEY = "headrace-api-key";

/** An answer that is not a success. `code` is the API's error code. */
export class ApiError extends Error {
  constructor(status, message, code = null, retryAfter = null) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

export class Api {
  #askForKey;
  #asking = null;

  /** `askForKey(refused)` lets the person enter a key; resolves with it, or null. */
  constructor(askForKey) {
    this.#askForKey = askForKey;
  }

  get hasKey() {
    return sessionStorage.getItem(KEY) !== null;
  }

  forgetKey() {
    sessionStorage.removeItem(KEY);
  }

  /** Sends a request and returns its successful response. Asks for a key at 401. */
  async send(path, { method = "GET", body = null, headers = {}, signal = null, keepalive = false } = {}) {
    for (;;) {
      const key = sessionStorage.getItem(KEY);
      const all = { ...headers };
      if (key !== null) all.authorization = `Bearer ${key}`;
      if (body !== null) all["content-type"] = "application/json";
      const response = await fetch(path, {
        method,
        headers: all,
        body: body === null ? null : JSON.stringify(body),
        signal,
        keepalive,
        cache: "no-store",
      });
      if (response.ok) return response;
      const error = await failure(response);
      if (error.status !== 401 || keepalive) throw error;
      if (!(await this.#newKey(key))) throw error;
    }
  }

  async json(path, options) {
    return (await this.send(path, options)).json();
  }

  /** Whether there is another key now than the one that was refused. Asks once for all callers. */
  async #newKey(refused) {
    if (sessionStorage.getItem(KEY) !== refused) return true;
    this.#asking ??= this.#askForKey(refused !== null).finally(() => (this.#asking = null));
    const key = await this.#asking;
    if (key === null) return false;
    sessionStorage.setItem(KEY, key);
    return true;
  }
}

async function failure(response) {
  const text = await response.text();
  let error = null;
  try {
    error = JSON.parse(text).error;
  } catch {
    // A proxy's page, for example: the status says more.
  }
  const message = error?.message ?? `The server answered ${response.status}.`;
  return new ApiError(
    response.status,
    message,
    error?.code ?? null,
    Number(response.headers.get("retry-after")) || null,
  );
}

/** The server-sent events of a response: objects with `id`, `event` and `data`. */
export async function* serverSentEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = { id: null, event: "message", data: [] };
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (event.data.length) yield { ...event, data: event.data.join("\n") };
          event = { id: null, event: "message", data: [] };
        } else takeField(event, line);
      }
      await drawn(); // a fast stream must not keep the page from answering clicks
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Lets the browser draw and handle input. */
function drawn() {
  return new Promise((resolve) => setTimeout(resolve));
}

function takeField(event, line) {
  const colon = line.indexOf(":");
  const name = colon < 0 ? line : line.slice(0, colon);
  const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
  if (name === "data") event.data.push(value);
  else if (name === "id" || name === "event") event[name] = value;
}

/** Resolves after a time, or at once when the signal is aborted. */
export function delay(milliseconds, signal = null) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal?.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
