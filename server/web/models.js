// The models on offer, and which of them is asked.

import { h } from "./dom.js";

const CHOSEN = "tidewheel.model";

export class Models {
  #select;
  #storage;
  #models = [];

  constructor(select, storage, onChange) {
    this.#select = select;
    this.#storage = storage;
    select.addEventListener("change", () => {
      try {
        storage.setItem(CHOSEN, select.value);
      } catch {
        // No room in the browser: it holds for as long as the page is open.
      }
      onChange();
    });
  }

  /** The one that is asked, {id, max_model_len}; undefined until the server has said. */
  get current() {
    return this.#models.find(({ id }) => id === this.#select.value);
  }

  set all(models) {
    this.#models = models;
    const shown = models.map(({ id }) => id.split("/").pop() || id);
    const options = models.map(({ id }, i) => {
      const isUnique = shown.indexOf(shown[i]) === shown.lastIndexOf(shown[i]);
      return h("option", { value: id, title: id }, isUnique ? shown[i] : id);
    });
    this.#select.replaceChildren(...options);
    const chosen = this.#storage.getItem(CHOSEN);
    if (models.some(({ id }) => id === chosen)) this.#select.value = chosen;
  }
}
