// A conversation's state and its operations. Messages are plain objects, as they are stored:
//   {role: "user", content, files?: [{name, text}], images?: [{name, url}]}
//   {role: "assistant", content, reasoning?, calls?: [{id, name, arguments}], model?, stats?, error?, ended?}
//   {role: "tool", content, call, name}
// Each also has a `parent`: the index of the message that it follows, or -1 for the first. Messages with the same
// parent are branches. The one shown contains `leaf`, the index of the last shown message.

import { withFiles } from "./files.js";
import { withImages } from "./images.js";

const TITLE_LENGTH = 60;

export class Conversation {
  #path = null; // the shown messages, cached until the conversation changes

  /** Without `leaf`, `all` is one branch. `model` is the one that answers, if the server has several. */
  constructor({ id, name = "", model, updated, all, leaf = null }) {
    this.id = id;
    this.name = name;
    this.model = model;
    this.updated = updated;
    this.all = all;
    this.leaf = leaf ?? all.length - 1;
    if (leaf === null) all.forEach((message, i) => (message.parent = i - 1));
  }

  static create() {
    const random = crypto.getRandomValues(new Uint32Array(2));
    const id = `${Date.now().toString(36)}-${random.join("-")}`;
    return new Conversation({ id, updated: Date.now(), all: [] });
  }

  /** The name that the user gave it, or its first words. */
  get title() {
    const first = this.messages.find((message) => message.role === "user");
    const file = first?.files?.[0] ?? first?.images?.[0];
    const words = (this.name || first?.content || file?.name || "").trim().replace(/\s+/g, " ");
    return words.length > TITLE_LENGTH ? `${words.slice(0, TITLE_LENGTH).trimEnd()}…` : words;
  }

  /** The messages that are shown. */
  get messages() {
    if (!this.#path) {
      this.#path = [];
      for (let i = this.leaf; i >= 0; i = this.all[i].parent) this.#path.push(this.all[i]);
      this.#path.reverse();
    }
    return this.#path;
  }

  add(message) {
    message.parent = this.leaf;
    this.all.push(message);
    this.#show(this.all.length - 1);
    this.updated = Date.now();
    return message;
  }

  /** Goes back to before `message`: the next message starts a new branch. An empty failed answer is dropped. */
  branchAt(message) {
    const empty = !message.content && !message.reasoning && !message.calls && message.role === "assistant";
    if (empty && this.all.at(-1) === message) this.all.pop();
    this.#show(message.parent);
  }

  /** The branches that `message` is one of. */
  branches(message) {
    return this.all.filter(({ parent }) => parent === message.parent);
  }

  /** Shows the branch of `message`, down to its most recent message. */
  choose(message) {
    let leaf = this.all.indexOf(message);
    for (let i = this.all.length - 1; i > leaf; i -= 1) {
      if (this.all[i].parent !== leaf) continue;
      leaf = i;
      i = this.all.length;
    }
    this.#show(leaf);
  }

  #show(leaf) {
    this.leaf = leaf;
    this.#path = null;
  }

  /** The last answer's tool calls that wait for a result. */
  openCalls() {
    const last = this.messages.findLastIndex((message) => message.role === "assistant");
    const answered = new Set(this.messages.slice(last + 1).map((message) => message.call));
    return usableCalls(this.messages[last]).filter((call) => !answered.has(call.id));
  }

  /** The API's `messages`, without answers that are empty. */
  forRequest(system) {
    const messages = system.trim() ? [{ role: "system", content: system }] : [];
    for (const message of this.messages) {
      if (message.role === "user") {
        messages.push({ role: "user", content: withImages(withFiles(message), message.images) });
      }
      else if (message.role === "tool") {
        messages.push({ role: "tool", tool_call_id: message.call, content: message.content });
      } else if (message.content || usableCalls(message).length) messages.push(answerForRequest(message));
    }
    return messages;
  }
}

/** Adds a chunk of the stream to an answer. Returns whether it had a token: text, or the end token. */
export function addChunk(answer, chunk) {
  const choice = chunk.choices?.[0];
  if (chunk.usage) answer.usage = chunk.usage;
  if (!choice) return false;
  const { content, tool_calls: calls } = choice.delta;
  const reasoning = choice.delta.reasoning_content ?? choice.delta.reasoning;
  if (content) answer.content += content;
  if (reasoning) answer.reasoning = (answer.reasoning ?? "") + reasoning;
  for (const part of calls ?? []) addCall((answer.calls ??= []), part);
  if (choice.finish_reason) answer.ended = choice.finish_reason;
  return Boolean(content || reasoning || calls?.length || choice.finish_reason);
}

function addCall(calls, part) {
  const call = (calls[part.index ?? calls.length] ??= { id: "", name: "", arguments: "" });
  if (part.id) call.id = part.id;
  call.name += part.function?.name ?? "";
  call.arguments += part.function?.arguments ?? "";
}

function answerForRequest(message) {
  const answer = { role: "assistant", content: message.content };
  if (message.reasoning) answer.reasoning_content = message.reasoning;
  const calls = usableCalls(message);
  if (calls.length) {
    answer.tool_calls = calls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
  }
  return answer;
}

/** The complete calls of an answer. If the answer was cut off, its last call may be incomplete. */
function usableCalls(message) {
  return (message?.calls ?? []).filter((call) => {
    try {
      return JSON.parse(call.arguments) !== null;
    } catch {
      return false;
    }
  });
}
