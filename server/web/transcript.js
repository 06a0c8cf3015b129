// Shows the conversation, with one view for each message.

import { AnswerView } from "./answer-view.js";
import { copyText, h, icon, iconButton, scrollable } from "./dom.js";
import { forgetColours } from "./highlight.js";
import { picture } from "./images.js";

/**
 * `actions` are the reader's actions: edit(message, text), regenerate(message), choose(message), giveResults(results).
 * `announce` lets a screen reader read new text.
 */
export class Transcript {
  #root;
  #actions;
  #announce;
  #views = new Map();

  constructor(root, actions, announce) {
    this.#root = root;
    this.#actions = actions;
    this.#announce = announce;
  }

  /** Shows a conversation instead of the previous one. */
  show(conversation) {
    this.#views.clear();
    forgetColours();
    this.#root.replaceChildren();
    for (const message of conversation.messages) this.add(message, conversation, () => {}).finish?.();
    this.askForResults(conversation);
  }

  /** Adds the view of a conversation's message. An answer's view has update() and finish(). */
  add(message, conversation, announce = this.#announce) {
    const view = this.#viewOf(message, announce);
    const branches = conversation.branches(message);
    if (branches.length > 1) view.element.querySelector(".actions")?.prepend(this.#chooser(branches, message));
    this.#views.set(message, view);
    this.#root.append(view.element);
    return view;
  }

  /** Removes the views of messages that are no longer in the conversation. */
  trim(conversation) {
    const kept = new Set(conversation.messages);
    for (const [message, view] of this.#views) {
      if (kept.has(message)) continue;
      view.element.remove();
      this.#views.delete(message);
    }
  }

  /** Removes the form for results: they were given, or the conversation continued without them. */
  stopAskingForResults() {
    this.#root.querySelector(".results")?.remove();
  }

  /** Lets the reader enter results for the calls that wait for them. */
  askForResults(conversation) {
    const open = conversation.openCalls();
    const last = conversation.messages.findLast((message) => message.role === "assistant");
    if (open.length) this.#views.get(last).askForResults(open, this.#actions.giveResults);
  }

  #chooser(branches, message) {
    const at = branches.indexOf(message);
    const step = (label, by) => {
      const to = branches[at + by];
      const button = iconButton("chevron", label, () => this.#actions.choose(to));
      button.disabled = !to;
      return button;
    };
    return h(
      "span",
      { class: "branches changes", role: "group", "aria-label": "Branches" },
      step("Previous branch", -1),
      h("span", {}, `${at + 1} of ${branches.length}`),
      step("Next branch", 1),
    );
  }

  #viewOf(message, announce) {
    if (message.role === "user") return userView(message, this.#actions);
    if (message.role === "tool") return toolView(message);
    return new AnswerView(message, this.#actions, announce);
  }
}

function userView(message, actions) {
  const pictures = (message.images ?? []).map(picture);
  const text = h("div", { class: "said" }, ...pictures, ...(message.files ?? []).map(fileView), message.content);
  const copy = iconButton("copy", "Copy message", () => copyText(message.content, copy));
  const edit = iconButton("edit", "Edit message", () => {
    element.replaceChildren(editor(message, actions, () => {
      element.replaceChildren(text, buttons);
      edit.focus();
    }));
    const area = element.querySelector("textarea");
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  });
  edit.classList.add("changes");
  const buttons = h("div", { class: "actions" }, edit, copy);
  const element = h("article", { class: "turn user", "aria-label": "You" }, text, buttons);
  return { element };
}

function fileView({ name, text }) {
  const summary = h("summary", {}, icon("chevron"), h("span", {}, name));
  return h("details", { class: "fold file" }, summary, h("pre", scrollable(name), text));
}

function editor(message, actions, onCancel) {
  const area = h("textarea", { "aria-label": "Edit message", rows: "2" });
  area.value = message.content;
  const send = () => {
    if (area.value.trim()) actions.edit(message, area.value);
  };
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    } else if (event.key === "Escape") {
      event.stopPropagation();
      onCancel();
    }
  });
  return h(
    "div",
    { class: "editor" },
    area,
    h("p", {}, "This starts a branch; the messages below are kept."),
    h("button", { type: "button", class: "quiet", onclick: onCancel }, "Cancel"),
    h("button", { type: "button", class: "primary changes", onclick: send }, "Send"),
  );
}

function toolView(message) {
  const summary = h("summary", {}, icon("chevron"), h("span", {}, "Result of ", h("code", {}, message.name)));
  const fold = h("details", { class: "fold" }, summary, h("pre", scrollable("Result"), message.content));
  return { element: h("article", { class: "turn tool", "aria-label": `Result of ${message.name}` }, fold) };
}
