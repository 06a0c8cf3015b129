// The available models, and the selected one.

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
        // The browser has no storage left: the choice lasts while the page is open.
      }
      onChange();
    });
  }

  /** Whether the selected model sees images. */
  get seesImages() {
    return this.current?.input_modalities?.includes("image") ?? false;
  }

  /** Whether the selected model writes text. Others are for embeddings, scores or classes. */
  get writesText() {
    return this.current?.output_modalities?.includes("text") ?? true;
  }

  /** The selected model, {id, max_model_len, input_modalities}; undefined until the server has listed its models. */
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
