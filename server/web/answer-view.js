// Shows an answer while it streams and afterwards: reasoning and tool calls in folds, text as Markdown.

import { copyText, h, icon, iconButton, scrollable } from "./dom.js";
import { duration, rate } from "./format.js";
import { colour, colourSoon } from "./highlight.js";
import { MarkdownStream } from "./markdown-stream.js";
import { setFormulas } from "./math.js";
import { speed } from "./metrics.js";

const ENDINGS = {
  length: "cut at the limit of tokens",
  content_filter: "cut by a filter",
  stopped: "stopped",
};

export class AnswerView {
  #message;
  #text = h("div", { class: "markdown" });
  #stream;
  #shown = 0; // number of characters shown of the content
  #reasoning = null;
  #folds = []; // one for each tool call
  #calls = h("div", { class: "calls" });
  #wait = h("p", { class: "wait", "aria-hidden": "true" }, h("span"), h("span"), h("span"));
  #waitsFor = h("small", { "aria-live": "polite" });
  #stats = h("p", { class: "stats" });
  #footer;
  #copy;

  constructor(message, actions, announce) {
    this.#message = message;
    this.#stream = new MarkdownStream(this.#text, (text, node) => {
      announce(text);
      adorn(node);
    }, colourSoon);
    const copy = (this.#copy = iconButton("copy", "Copy answer", () => copyText(message.content, copy)));
    const retry = () => actions.regenerate(message);
    const again = h("button", { type: "button", class: "quiet again changes", onclick: retry }, icon("again"), "Retry");
    this.#footer = h("footer", { class: "actions writing" }, this.#stats, copy, again);
    this.element = h(
      "article",
      { class: "turn answer", "aria-label": "Answer" },
      this.#wait, this.#waitsFor, this.#text, this.#calls, this.#footer,
    );
  }

  /** Shows what the answer waits for. */
  wait(words) {
    if (this.#wait.isConnected) this.#waitsFor.textContent = words;
  }

  /** Draws what was added to the message. */
  update() {
    const { content, reasoning, calls } = this.#message;
    if (reasoning) this.#showReasoning(reasoning, !content && !calls);
    if (content.length > this.#shown) {
      this.#stream.append(content.slice(this.#shown));
      this.#shown = content.length;
    }
    calls?.forEach((call, i) => this.#showCall(call, (this.#folds[i] ??= this.#addFold())));
    if (content || reasoning || calls) this.#endWait();
  }

  /** Draws the end of the message. */
  finish() {
    const { content, reasoning, calls, model, error, ended, stats } = this.#message;
    this.update();
    this.#stream.finish();
    this.#endWait();
    if (reasoning) this.#showReasoning(reasoning, false);
    calls?.forEach((call, i) => (this.#folds[i].code.data = indented(call.arguments)));
    if (error) this.#footer.before(h("p", { class: "failure", role: "alert" }, error));
    const words = [model?.split("/").pop(), ENDINGS[ended], stats && statsText(stats)];
    this.#stats.textContent = words.filter(Boolean).join(" · ");
    this.#copy.hidden = !content;
    this.#footer.classList.remove("writing");
  }

  /** Adds a form for the results of `calls`. `onResults` returns whether it could use them. */
  askForResults(calls, onResults) {
    const areas = calls.map((call) => {
      const area = h("textarea", { rows: "2", required: true, spellcheck: "false" });
      return { call, area, label: h("label", { class: "field" }, h("span", {}, `Result of ${call.name}`), area) };
    });
    const form = h(
      "form",
      { class: "results" },
      ...areas.map(({ label }) => label),
      h("button", { type: "submit", class: "primary changes" }, `Send the result${calls.length > 1 ? "s" : ""}`),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const results = areas.map(({ call, area }) => ({
        role: "tool", content: area.value, call: call.id, name: call.name,
      }));
      if (onResults(results)) for (const { fold } of this.#folds) fold.open = false;
    });
    for (const { fold } of this.#folds) fold.open = true;
    this.#calls.append(form);
  }

  #endWait() {
    this.#wait.remove();
    this.#waitsFor.remove();
  }

  #showReasoning(reasoning, thinking) {
    if (!this.#reasoning) {
      const text = document.createTextNode("");
      const title = h("span");
      const summary = h("summary", {}, icon("chevron"), title);
      const thoughts = h("div", { class: "thoughts", ...scrollable("Thoughts") }, text);
      const fold = h("details", { class: "fold reasoning" }, summary, thoughts);
      this.#reasoning = { text, title, fold };
      this.#text.before(fold);
    }
    const { text, title, fold } = this.#reasoning;
    if (reasoning.length > text.length) text.appendData(reasoning.slice(text.length));
    const words = thinking ? "Thinking" : "Thought";
    if (title.textContent !== words) title.textContent = words;
    fold.classList.toggle("working", thinking);
  }

  #addFold() {
    const name = h("code");
    const code = document.createTextNode("");
    const summary = h("summary", {}, icon("chevron"), h("span", {}, "Calls ", name));
    const fold = h("details", { class: "fold call" }, summary, h("pre", scrollable("Arguments"), code));
    fold.open = !this.#message.ended;
    this.#calls.append(fold);
    return { name, code, fold };
  }

  #showCall(call, fold) {
    if (fold.name.textContent !== call.name) fold.name.textContent = call.name;
    if (call.arguments.length > fold.code.length) fold.code.appendData(call.arguments.slice(fold.code.length));
  }
}

/** Colours the code and sets the formulas of a complete block. */
function adorn(block) {
  for (const figure of block.matches(".code") ? [block] : block.querySelectorAll(".code")) {
    colour(figure.querySelector("code").firstChild, figure.querySelector("figcaption span").textContent);
  }
  setFormulas(block);
}

/** `stats`: an answer's number of `tokens`, the time to its `firstToken`, and the `seconds` from there to its last. */
function statsText({ tokens, firstToken, seconds }) {
  const parts = [`${tokens} ${tokens === 1 ? "token" : "tokens"}`];
  // For tokens that arrive within a few frames, the rate would measure the page, not the server.
  if (seconds >= 0.1) parts.push(`${rate(speed(tokens, seconds))} a second`);
  return [...parts, `first after ${duration(firstToken)}`].join(" · ");
}

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}
