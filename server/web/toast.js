// A short note at the edge of the page, with a button for an action.

import { h } from "./dom.js";

const SHOWN_MS = 8000;

export class Toast {
  #element;
  #timer;

  constructor(element) {
    this.#element = element;
  }

  /** Shows `words`; `action` is {label, act}. */
  show(words, action) {
    clearTimeout(this.#timer);
    this.#element.replaceChildren(h("span", {}, words));
    if (action) {
      const onclick = () => {
        this.#clear();
        action.act();
      };
      this.#element.append(h("button", { type: "button", onclick }, action.label));
    }
    this.#timer = setTimeout(() => this.#clear(), SHOWN_MS);
  }

  #clear() {
    this.#element.replaceChildren();
  }
}
