// The server that this page came from.

import { eventLists } from "./events.js";

// Addresses are relative to this file's, so that the page works under any prefix of a proxy.
const ROOT = new URL("../", import.meta.url);
const KEY = "tidewheel.key";
// Of several replicas behind one address, a session's is always the same one.
const PANEL = { cache: "no-store", headers: { "x-session-id": `panel-${Math.random().toString(36).slice(2)}` } };

/** What the server, or the way to it, had to say. `status` is 0 where there was no answer. */
export class ServerError extends Error {
  constructor(message, { status = 0, param = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

/** Talks to the server, with the key that the person gave for this tab. */
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

  /** The models on offer: [{id, max_model_len}, ...]. */
  async models() {
    return (await (await this.#ask("v1/models")).json()).data;
  }

  async version() {
    return (await (await this.#ask("version")).json()).version;
  }

  /** What is served, and with what; and which replica says so, if there are several behind one address. */
  async info() {
    const response = await this.#ask("server_info", PANEL);
    return { ...(await response.json()), replica: response.headers.get("x-tidewheel-replica") };
  }

  /** The metrics as Prometheus' text. */
  async metrics() {
    return (await this.#ask("metrics", PANEL)).text();
  }

  /** The chunks of an answer, a list at a time. Raises ServerError, and AbortError when `signal` aborts. */
  async *chat(body, signal) {
    const headers = { "content-type": "application/json" };
    const options = { method: "POST", body: JSON.stringify(body), headers, signal };
    const response = await this.#ask("v1/chat/completions", options);
    try {
      for await (const events of eventLists(response.body)) {
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
    // A proxy's page, most likely: its status says enough.
  }
  let message = error.message ?? `The server answered ${response.status} ${response.statusText}`;
  const wait = response.headers.get("retry-after");
  if (wait) message += ` Try again in ${wait} s.`;
  return new ServerError(message, { status: response.status, param: error.param });
}
