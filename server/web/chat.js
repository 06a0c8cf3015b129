// The open conversation, and the answer that is being written.

import { Conversation, addChunk } from "./conversation.js";

/**
 * `models`, `parameters` and `server` make the requests, `transcript` and `scroller` show the answers, and `history`
 * keeps them. `listener` is notified: onChange() at any change of state, onOpen(conversation), onFailure(error, retry),
 * and onUnkept() if the browser has no storage left.
 */
export class Chat {
  conversation = Conversation.create();
  #running = null; // {controller, conversation, forgotten}
  #parts;
  #listener;

  constructor(parts, listener) {
    this.#parts = parts;
    this.#listener = listener;
  }

  get busy() {
    return this.#running !== null;
  }

  /** Sends a message. Returns false while an answer is being written, and if the parameters are not valid. */
  send(text, { files, images } = {}) {
    const said = text.trim() !== "" || files?.length > 0 || images?.length > 0;
    return said && this.#ask(() => this.#add({ role: "user", content: text, files, images }));
  }

  /** Sends `text` in a new branch, as an alternative to `message`. */
  edit(message, text) {
    return this.#has(message) && this.#ask(() => {
      this.#branchAt(message);
      this.#add({ role: "user", content: text, files: message.files, images: message.images });
    });
  }

  /** Requests another answer in a new branch, as an alternative to `message`. */
  regenerate(message) {
    return this.#has(message) && this.#ask(() => this.#branchAt(message));
  }

  /** Shows the branch of `message`. */
  choose(message) {
    if (this.busy) return;
    this.conversation.choose(message);
    this.#parts.transcript.show(this.conversation);
    this.#parts.history.save(this.conversation);
    this.#listener.onChange();
  }

  /** Answers the model's tool calls: `results` are messages. */
  giveResults(results) {
    return this.#ask(() => results.forEach((result) => this.#add(result)));
  }

  stop() {
    this.#running?.controller.abort();
  }

  /** Opens another conversation. An answer that is being written stops, and what it has so far is kept. */
  open(conversation) {
    this.stop();
    this.conversation = conversation;
    this.#parts.transcript.show(conversation);
    this.#parts.scroller.toEnd();
    this.#listener.onOpen(conversation);
    this.#listener.onChange();
  }

  /** Remembers with the conversation that the user has chosen another model. */
  useModel() {
    const { conversation } = this;
    if (!conversation.messages.length) return;
    conversation.model = this.#parts.models.current.id;
    if (!this.busy) this.#parts.history.save(conversation);
  }

  /** Makes sure that a deleted conversation is not stored again when its answer stops. */
  forget(ids) {
    if (this.#running && ids.includes(this.#running.conversation.id)) this.#running.forgotten = true;
    if (ids.includes(this.conversation.id)) this.open(Conversation.create());
  }

  /** Stores the conversation that is being answered, with the answer so far. */
  keep() {
    const { history } = this.#parts;
    const { conversation, forgotten } = this.#running;
    if (!forgotten && !history.save(conversation)) this.#listener.onUnkept();
  }

  // A failed answer may be retried when another conversation is already open.
  #has(message) {
    return this.conversation.messages.includes(message);
  }

  #add(message) {
    this.#parts.transcript.add(this.conversation.add(message), this.conversation);
  }

  #branchAt(message) {
    this.conversation.branchAt(message);
    this.#parts.transcript.trim(this.conversation);
  }

  #ask(prepare) {
    const body = this.#running ? null : this.#parts.parameters.read();
    if (!body) return false;
    this.#parts.transcript.stopAskingForResults();
    prepare();
    this.#answer(body);
    return true;
  }

  async #answer(body) {
    const { models, parameters, scroller, server, transcript } = this.#parts;
    const { conversation } = this;
    const messages = conversation.forRequest(parameters.system);
    const { id: model, chat_sampling: sampling } = models.current ?? {};
    const chosen = models.all.length > 1 ? model : undefined;
    conversation.model = chosen;
    const answer = conversation.add({ role: "assistant", content: "", model: chosen });
    const view = transcript.add(answer, conversation);
    const controller = new AbortController();
    const clock = new Clock();
    let frame = 0;
    const draw = () => {
      frame = 0;
      view.update();
      scroller.follow();
    };
    this.#running = { controller, conversation, forgotten: false };
    this.keep();
    this.#listener.onChange();
    scroller.toEnd();
    let failure = null;
    try {
      const streamed = { stream: true, stream_options: { include_usage: true } };
      const request = { model, ...sampling, ...body, messages, ...streamed };
      for await (const chunks of server.chat(request, controller.signal, (words) => view.wait(words))) {
        for (const chunk of chunks) if (addChunk(answer, chunk)) clock.tick();
        frame ||= requestAnimationFrame(draw);
      }
    } catch (error) {
      if (controller.signal.aborted) answer.ended = "stopped";
      else failure = error;
    }
    cancelAnimationFrame(frame);
    answer.stats = clock.stats(answer.usage);
    if (failure) answer.error = failure.message;
    view.finish();
    this.keep();
    this.#running = null;
    if (conversation === this.conversation) transcript.askForResults(conversation);
    scroller.follow();
    this.#listener.onChange();
    if (failure) this.#listener.onFailure(failure, () => this.regenerate(answer));
  }
}

/** Records when an answer's tokens arrived. */
class Clock {
  #asked = performance.now();
  #first = null;
  #last = null;

  tick() {
    this.#last = performance.now();
    this.#first ??= this.#last;
  }

  stats(usage) {
    if (this.#first === null || !usage) return undefined;
    const firstToken = (this.#first - this.#asked) / 1000;
    return { tokens: usage.completion_tokens, firstToken, seconds: (this.#last - this.#first) / 1000 };
  }
}
