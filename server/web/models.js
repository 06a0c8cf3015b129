// The available models, and the chosen one.

import { h } from "./dom.js";
import { shortNames } from "./model-switch.js";

const CHOSEN = "tidewheel.model";

/**
 * The models that the server has listed. They are chosen by `select`, or by `modelSwitch` (see ModelSwitch) on a server
 * that loads several on demand. `onChange` is called when the user has chosen one.
 */
export class Models {
  #select;
  #switch;
  #storage;
  #onChange;
  #chosen = null; // of the open conversation: an id, which the list need not have
  #last; // that the user has chosen
  #refused = new Set(); // of "load" and "unload"
  all = [];
  areKnown = false;

  constructor(select, modelSwitch, storage, onChange) {
    this.#select = select;
    this.#switch = modelSwitch;
    this.#storage = storage;
    this.#onChange = onChange;
    this.#last = storage.getItem(CHOSEN);
    select.addEventListener("change", () => this.choose(select.value));
  }

  /** Whether the chosen model sees images. */
  get seesImages() {
    return this.current?.input_modalities?.includes("image") ?? false;
  }

  /** Whether the chosen model writes text. Others are for embeddings, scores or classes. */
  get writesText() {
    return this.current?.output_modalities?.includes("text") ?? true;
  }

  /** The chosen model, {id, max_model_len, input_modalities}; undefined until the server has listed its models. */
  get current() {
    const named = (name) => this.all.find(({ id }) => id === name);
    return named(this.#chosen) ?? named(this.#last) ?? this.all[0];
  }

  /** Whether the server loads models on demand. Each then has a `status` {value, progress, error} and a `size`. */
  get areLoadedOnDemand() {
    return this.all.some(({ status }) => status);
  }

  /** Whether a model is being loaded. */
  get isAnyLoading() {
    return this.all.some(({ status }) => status?.value === "loading");
  }

  /** Takes the server's list, as it is now; an empty one if it cannot be had. */
  list(models) {
    this.all = models;
    this.areKnown = true;
    if (!this.areLoadedOnDemand) {
      const names = shortNames(models);
      const options = models.map(({ id }) => h("option", { value: id, title: id }, names.get(id)));
      this.#select.replaceChildren(...options);
    }
    this.#show();
  }

  /** The user's choice. It is kept for new conversations. */
  choose(id) {
    this.#chosen = this.#last = id;
    try {
      this.#storage.setItem(CHOSEN, id);
    } catch {
      // The browser has no storage left: the choice lasts while the page is open.
    }
    this.#show();
    this.#onChange();
  }

  /** Goes back to the model of a conversation. Returns false if the server does not have it any more. */
  follow(id) {
    this.#chosen = id ?? null;
    this.#show();
    return !id || !this.all.length || this.current.id === id;
  }

  /** Takes note of what this client may not do, "load" or "unload"; without an argument, that it may try anything. */
  refuse(action) {
    if (action) this.#refused.add(action);
    else this.#refused.clear();
    this.#show();
  }

  #show() {
    const { current } = this;
    if (!current) return;
    this.#select.parentElement.hidden = this.areLoadedOnDemand;
    if (this.areLoadedOnDemand) this.#switch.show(this.all, current, this.#refused);
    else this.#select.value = current.id;
  }
}
