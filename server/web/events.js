// Server-sent events. This server sends only `data` lines, and comments while a request waits.

/** Splits a stream of text, in pieces of any size, into the data of its events. */
export class EventReader {
  #pending = "";
  #data = [];
  #onComment;

  /** `onComment` gets the text of each comment. */
  constructor(onComment = () => {}) {
    this.#onComment = onComment;
  }

  /** The events that `text` completes. */
  feed(text) {
    const lines = (this.#pending + text).split("\n");
    this.#pending = lines.pop();
    const events = [];
    for (const raw of lines) {
      const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
      if (line[0] === ":") this.#onComment(line.slice(1).trim());
      else if (line.startsWith("data:")) this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      else if (!line && this.#data.length) events.push(this.#data.splice(0).join("\n"));
    }
    return events;
  }
}

/** The events of a body, in lists of those that arrived together. `onComment` gets its comments. */
export async function* eventLists(body, onComment) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  const events = new EventReader(onComment);
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const complete = events.feed(part.value);
    if (complete.length) yield complete;
  }
}
