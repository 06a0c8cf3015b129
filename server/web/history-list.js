// The list of kept conversations: open one, delete one, delete all, and undo that.

import { h, iconButton } from "./dom.js";

export class HistoryList {
  #list;
  #deleteAll;
  #fallback;
  #parts;
  #onOpen;

  /** `fallback` gets the focus when the focused entry goes. `parts` are {history, chat, toast}. */
  constructor({ list, deleteAll, fallback }, parts, onOpen) {
    this.#list = list;
    this.#deleteAll = deleteAll;
    this.#fallback = fallback;
    this.#parts = parts;
    this.#onOpen = onOpen;
    deleteAll.addEventListener("click", () => {
      const ids = parts.history.list().map((entry) => entry.id);
      this.#remove(ids, "All conversations were deleted.");
    });
    window.addEventListener("storage", () => this.show()); // another tab
  }

  show() {
    const entries = this.#parts.history.list();
    this.#list.replaceChildren(...entries.map((entry) => this.#entry(entry)));
    this.#deleteAll.hidden = !entries.length;
  }

  #entry({ id, title }) {
    const { history, chat } = this.#parts;
    const current = id === chat.conversation.id;
    const open = () => {
      const kept = current ? null : history.load(id);
      if (kept) chat.open(kept);
      this.#onOpen();
    };
    return h(
      "li",
      {},
      h("button", { type: "button", "aria-current": current ? "true" : null, title, onclick: open }, title),
      iconButton("trash", `Delete “${title}”`, () => this.#remove([id], "The conversation was deleted.")),
    );
  }

  #remove(ids, words) {
    const { history, chat, toast } = this.#parts;
    const bringBack = history.remove(ids);
    chat.forget(ids);
    this.show();
    this.#fallback.focus();
    const undo = () => {
      bringBack();
      this.show();
    };
    toast.show(words, { label: "Undo", act: undo });
  }
}
