// A conversation's state and what may be done to it. Messages are plain objects, as they are kept:
//   {role: "user", content}
//   {role: "assistant", content, reasoning?, calls?: [{id, name, arguments}], stats?, error?, ended?}
//   {role: "tool", content, call, name}

const TITLE_LENGTH = 60;

export class Conversation {
  constructor({ id, updated, messages }) {
    this.id = id;
    this.updated = updated;
    this.messages = messages;
  }

  static create() {
    const random = crypto.getRandomValues(new Uint32Array(2));
    const id = `${Date.now().toString(36)}-${random.join("-")}`;
    return new Conversation({ id, updated: Date.now(), messages: [] });
  }

  get title() {
    const first = this.messages.find((message) => message.role === "user")?.content.trim().replace(/\s+/g, " ") ?? "";
    return first.length > TITLE_LENGTH ? `${first.slice(0, TITLE_LENGTH).trimEnd()}…` : first;
  }

  add(message) {
    this.messages.push(message);
    this.updated = Date.now();
    return message;
  }

  /** Forgets the messages from `message` on. */
  forgetFrom(message) {
    const index = this.messages.indexOf(message);
    if (index >= 0) this.messages.splice(index);
  }

  /** The calls of the last answer that wait for a result. */
  openCalls() {
    const last = this.messages.findLastIndex((message) => message.role === "assistant");
    const answered = new Set(this.messages.slice(last + 1).map((message) => message.call));
    return usableCalls(this.messages[last]).filter((call) => !answered.has(call.id));
  }

  /** The API's `messages`. Answers that never came are left out. */
  forRequest(system) {
    const messages = system.trim() ? [{ role: "system", content: system }] : [];
    for (const message of this.messages) {
      if (message.role === "user") messages.push({ role: "user", content: message.content });
      else if (message.role === "tool") {
        messages.push({ role: "tool", tool_call_id: message.call, content: message.content });
      } else if (message.content || usableCalls(message).length) messages.push(answerForRequest(message));
    }
    return messages;
  }
}

/** Adds a chunk of the stream to an answer. Returns whether it brought something to show. */
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
  return Boolean(content || reasoning || calls?.length);
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

/** The calls of an answer that are whole: an answer that was cut may have cut its last one. */
function usableCalls(message) {
  return (message?.calls ?? []).filter((call) => {
    try {
      return JSON.parse(call.arguments) !== null;
    } catch {
      return false;
    }
  });
}
