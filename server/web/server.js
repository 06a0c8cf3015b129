// The server that this page came from.

import { eventLists } from "./events.js";

// Addresses are relative to this file, so that the page works under any proxy prefix.
const ROOT = new URL("../", import.meta.url);
const KEY = "tidewheel.key";
// With several replicas behind one address, a session always reaches the same one.
const PANEL = { cache: "no-store", headers: { "x-session-id": `panel-${Math.random().toString(36).slice(2)}` } };

/** An error from the server or from the network. `status` is 0 if there was no response. */
export class ServerError extends Error {
  constructor(message, { status = 0, param = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

/** Talks to the server, with the key that the user entered in this tab. */
export class Server {
  #session;

  constructor(session) {
    this.#session = session;
  }

  get key() {
    return this.#session.getItem(KEY) ?? "";
  }

  set key(key) {
    if (key) this.#session.setItem(KEY, key);
    else this.#session.removeItem(KEY);
  }

  /** The available models: [{id, max_model_len}, ...], with `status` and `size` if they are loaded on demand. */
  async models() {
    return (await (await this.#ask("v1/models", PANEL)).json()).data;
  }

  /** Begins to "load" a model, or does "unload" it. */
  async manageModel(action, id) {
    await this.#post(`models/${action}`, { model: id }, PANEL);
  }

  async version() {
    return (await (await this.#ask("version")).json()).version;
  }

  /**
   * Facts about the served model and the server, and the replica that responded, if there are several. `model` names one
   * of several models.
   */
  async info(model) {
    const query = model === undefined ? "" : `?model=${encodeURIComponent(model)}`;
    const response = await this.#ask(`server_info${query}`, PANEL);
    return { ...(await response.json()), replica: response.headers.get("x-tidewheel-replica") };
  }

  /** The metrics as Prometheus' text. */
  async metrics() {
    return (await this.#ask("metrics", PANEL)).text();
  }

  /**
   * The chunks of an answer, one list at a time. `onComment` gets what the server says while the request waits. Throws
   * ServerError, or AbortError when `signal` aborts.
   */
  async *chat(body, signal, onComment) {
    const response = await this.#post("v1/chat/completions", body, { signal });
    try {
      for await (const events of eventLists(response.body, onComment)) {
        const done = events.indexOf("[DONE]");
        const chunks = (done < 0 ? events : events.slice(0, done)).map((data) => JSON.parse(data));
        const failure = chunks.findIndex((chunk) => chunk.error);
        if (failure !== 0 && chunks.length) yield failure < 0 ? chunks : chunks.slice(0, failure);
        if (failure >= 0) throw new ServerError(chunks[failure].error.message);
        if (done >= 0) return;
      }
    } catch (error) {
      if (error instanceof ServerError || error.name === "AbortError") throw error;
      throw new ServerError(`The connection broke: ${error.message}`);
    }
    throw new ServerError("The connection ended before the answer did.");
  }

  #post(path, body, options) {
    const headers = { "content-type": "application/json", ...options.headers };
    return this.#ask(path, { ...options, method: "POST", body: JSON.stringify(body), headers });
  }

  async #ask(path, options = {}) {
    const headers = { ...options.headers };
    if (this.key) headers.authorization = `Bearer ${this.key}`;
    let response;
    try {
      response = await fetch(new URL(path, ROOT), { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The server cannot be reached.");
    }
    if (!response.ok) throw await failureOf(response);
    return response;
  }
}

async function failureOf(response) {
  const text = await response.text();
  let error = {};
  try {
    error = JSON.parse(text).error ?? {};
  } catch {
    // Probably a proxy's page: its status says enough.
  }
  let message = error.message ?? `The server answered ${response.status} ${response.statusText}`;
  const wait = response.headers.get("retry-after");
  if (wait) message += ` Try again in ${wait} s.`;
  return new ServerError(message, { status: response.status, param: error.param });
}
