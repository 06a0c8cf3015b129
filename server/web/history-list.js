// The list of stored conversations: find, open, rename, export, delete, and undo a deletion.

import { h, iconButton } from "./dom.js";
import { exportFile, importFile } from "./exchange.js";

export class HistoryList {
  #list;
  #search;
  #buttons;
  #fallback;
  #parts;
  #onOpen;
  #unfolded = null; // the id of the conversation whose actions are shown

  /** `fallback` gets the focus when the focused entry is removed. `parts` are {history, chat, toast}. */
  constructor({ list, search, deleteAll, exportAll, importButton, importInput, fallback }, parts, onOpen) {
    this.#list = list;
    this.#search = search;
    this.#buttons = [deleteAll, exportAll];
    this.#fallback = fallback;
    this.#parts = parts;
    this.#onOpen = onOpen;
    search.addEventListener("input", () => this.show());
    deleteAll.addEventListener("click", () => this.#remove(this.#ids(), "All conversations were deleted."));
    exportAll.addEventListener("click", () => this.#export(this.#ids()));
    importButton.addEventListener("click", () => importInput.click());
    importInput.addEventListener("change", () => {
      const [file] = importInput.files;
      if (file) this.#import(file);
      importInput.value = "";
    });
    window.addEventListener("storage", () => this.show()); // another tab changed it
  }

  show() {
    const { history } = this.#parts;
    const entries = history.find(this.#search.value);
    const nothing = h("li", { class: "nothing" }, "Nothing found");
    this.#list.replaceChildren(...entries.map((entry) => this.#entry(entry)));
    if (!entries.length && this.#search.value.trim()) this.#list.append(nothing);
    for (const button of this.#buttons) button.hidden = !history.list().length;
  }

  #entry({ id, title }) {
    const { history, chat } = this.#parts;
    const current = id === chat.conversation.id;
    const open = () => {
      const kept = current ? null : history.load(id);
      if (kept) chat.open(kept);
      this.#onOpen();
    };
    const more = iconButton("more", `Actions for “${title}”`, () => {
      this.#unfolded = this.#unfolded === id ? null : id;
      this.show();
      this.#list.querySelector(`[data-id="${id}"] .icon-button`).focus();
    });
    const unfolded = this.#unfolded === id;
    more.setAttribute("aria-expanded", String(unfolded));
    const item = h(
      "li",
      { "data-id": id },
      h("button", { type: "button", "aria-current": current ? "true" : null, title, onclick: open }, title),
      more,
    );
    if (unfolded) item.append(this.#actions(id, title, item));
    return item;
  }

  #actions(id, title, item) {
    const action = (label, onclick) => h("button", { type: "button", class: "quiet", onclick }, label);
    return h(
      "div",
      { class: "entry-actions", role: "group", "aria-label": `Actions for “${title}”` },
      action("Rename", () => this.#rename(id, title, item)),
      action("Export", () => this.#export([id])),
      action("Delete", () => this.#remove([id], "The conversation was deleted.")),
    );
  }

  #rename(id, title, item) {
    const { history, chat } = this.#parts;
    const input = h("input", { "aria-label": "Name of the conversation", maxlength: "60" });
    const done = (name) => {
      const conversation = id === chat.conversation.id ? chat.conversation : history.load(id);
      if (name !== null && conversation) {
        conversation.name = name.trim();
        history.save(conversation);
      }
      this.#unfolded = null;
      this.show();
      this.#list.querySelector(`[data-id="${id}"] button`)?.focus();
    };
    input.value = title;
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.stopPropagation();
      done(event.key === "Enter" ? input.value : null);
    });
    const save = h("button", { type: "button", class: "quiet", onclick: () => done(input.value) }, "Save");
    item.replaceChildren(input, save);
    input.select();
    input.focus();
  }

  #ids() {
    return this.#parts.history.list().map(({ id }) => id);
  }

  #export(ids) {
    exportFile(ids.map((id) => this.#parts.history.load(id)).filter(Boolean));
  }

  async #import(file) {
    const { history, toast } = this.#parts;
    try {
      const conversations = await importFile(file);
      const kept = conversations.filter((conversation) => history.save(conversation)).length;
      toast.show(`${kept} of ${conversations.length} conversations were imported.`);
    } catch (error) {
      toast.show(error.message);
    }
    this.show();
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
