// The switch of models on a server that loads several on demand: their states and sizes, to choose, load and unload.

import { h } from "./dom.js";
import { percent, size } from "./format.js";

const SEARCHED = 8; // models that can be seen at a glance

/** What a model's `status` says, in words. */
export function stateOf({ value, progress, error }) {
  if (value === "loading") return progress > 0 ? `loading, ${percent(progress)}` : "loading";
  if (value === "failed") return error ? `failed: ${error}` : "failed";
  return value === "unloaded" ? "not loaded" : value;
}

/** The names of models without their folders, if they differ then too: a map by id. */
export function shortNames(models) {
  const short = models.map(({ id }) => id.split("/").pop() || id);
  const counts = new Map();
  for (const name of short) counts.set(name, (counts.get(name) ?? 0) + 1);
  return new Map(models.map(({ id }, i) => [id, counts.get(short[i]) === 1 ? short[i] : id]));
}

/** `button` opens the `panel` with the `list`. `actions` are the user's: choose(id), load(id), unload(id), open(). */
export class ModelSwitch {
  #button;
  #panel;
  #list;
  #search;
  #actions;
  #rows = new Map(); // by id

  constructor({ button, panel, list, search }, actions) {
    this.#button = button;
    this.#panel = panel;
    this.#list = list;
    this.#search = search;
    this.#actions = {
      ...actions,
      choose: (id) => {
        panel.hidePopover();
        actions.choose(id);
      },
    };
    panel.addEventListener("beforetoggle", () => {
      const { left, bottom } = button.getBoundingClientRect();
      panel.style.setProperty("--left", `${left}px`);
      panel.style.top = `${bottom + 4}px`;
    });
    panel.addEventListener("toggle", () => {
      button.setAttribute("aria-expanded", String(this.isOpen));
      if (this.isOpen) actions.open();
    });
    search.addEventListener("input", () => this.#filter());
  }

  get isOpen() {
    return this.#panel.matches(":popover-open");
  }

  /** Shows the models and which is chosen. `refused`: the actions that this client may not do, "load" or "unload". */
  show(models, chosen, refused) {
    const names = shortNames(models);
    this.#button.hidden = false;
    this.#search.parentElement.hidden = models.length <= SEARCHED;
    const { id, status } = chosen;
    this.#button.dataset.state = status.value;
    put(this.#button.querySelector(".name"), names.get(id));
    put(this.#button.querySelector(".sr"), `Model, ${stateOf(status)}: `);
    this.#button.title = `${id}, ${stateOf(status)}`;
    const before = [...this.#rows.keys()];
    if (before.length !== models.length || models.some((model, i) => model.id !== before[i])) {
      this.#rows = new Map(models.map((model) => [model.id, new Row(model.id, names.get(model.id), this.#actions)]));
      this.#list.replaceChildren(...[...this.#rows.values()].map(({ element }) => element));
      this.#filter();
    }
    for (const model of models) this.#rows.get(model.id).update(model, model === chosen, refused);
  }

  #filter() {
    const words = this.#search.value.toLowerCase().split(/\s+/);
    for (const [id, { element }] of this.#rows) {
      element.hidden = !words.every((word) => id.toLowerCase().includes(word));
    }
  }
}

/** A model in the list. What did not change is not touched, so that the focus stays and nothing is read out twice. */
class Row {
  #about = h("span", { class: "about" });
  #progress = h("progress", { max: "1" });
  #choose;
  #load;
  #unload;

  constructor(id, name, actions) {
    const about = this.#about;
    this.#choose = h(
      "button", { type: "button", class: "choose", title: id, onclick: () => actions.choose(id) },
      h("span", { class: "name" }, name), about,
    );
    const action = (label, act) =>
      h("button", { type: "button", class: "quiet", "aria-label": `${label} ${id}`, onclick: () => act(id) }, label);
    this.#load = action("Load", actions.load);
    this.#unload = action("Unload", actions.unload);
    this.#progress.setAttribute("aria-label", `Loading ${id}`);
    this.element = h("li", {}, this.#choose, this.#load, this.#unload, this.#progress);
  }

  update({ size: bytes, status }, isChosen, refused) {
    const { value, progress } = status;
    this.element.dataset.state = value;
    put(this.#about, [stateOf(status), size(bytes)].filter(Boolean).join(" · "));
    if (isChosen) this.#choose.setAttribute("aria-current", "true");
    else this.#choose.removeAttribute("aria-current");
    this.#progress.hidden = value !== "loading";
    this.#progress.value = progress ?? 0;
    this.#load.hidden = refused.has("load") || (value !== "unloaded" && value !== "failed");
    this.#unload.hidden = refused.has("unload") || value !== "loaded";
  }
}

function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
