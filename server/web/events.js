// Server-sent events. This server sends only `data` lines.

/** Splits a stream of text, in pieces of any size, into the data of its events. */
export class EventReader {
  #pending = "";
  #data = [];

  /** The events that `text` completes. */
  feed(text) {
    const lines = (this.#pending + text).split("\n");
    this.#pending = lines.pop();
    const events = [];
    for (const raw of lines) {
      const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
      if (line.startsWith("data:")) this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      else if (!line && this.#data.length) events.push(this.#data.splice(0).join("\n"));
    }
    return events;
  }
}

/** The events of a body, in lists of those that arrived together. */
export async function* eventLists(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  const events = new EventReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const complete = events.feed(part.value);
    if (complete.length) yield complete;
  }
}
