// The columns beside the conversation. Where there is room they stand there; elsewhere they slide over it, hold the
// focus, and leave with Escape or a touch beside them.

/** All columns of a page; while one lies over the others and `rest`, those rest. */
export class Drawers {
  #rest;
  #drawers;

  /** `columns` are [{element, toggle, room, onChange}, ...]; `room` is a media query: there is a place for it. */
  constructor(app, rest, columns) {
    this.#rest = rest;
    this.#drawers = columns.map((column) => new Drawer(column, () => this.#settle()));
    app.addEventListener("click", (event) => event.target === app && this.uncover());
    this.#settle();
  }

  /** Opens the column `element`. */
  open(element) {
    this.#drawers.find((drawer) => drawer.element === element).set(true);
  }

  /** Closes what lies over the conversation. */
  uncover() {
    for (const drawer of this.#drawers) if (drawer.covers) drawer.set(false);
  }

  #settle() {
    const above = this.#drawers?.find((drawer) => drawer.covers);
    for (const element of this.#rest) element.inert = above !== undefined;
    for (const drawer of this.#drawers ?? []) drawer.element.inert = !drawer.isOpen || (above ?? drawer) !== drawer;
  }
}

class Drawer {
  isOpen = false;
  #toggle;
  #room;
  #onChange;
  #settle;

  constructor({ element, toggle, room, onChange = () => {} }, settle) {
    this.element = element;
    this.#toggle = toggle;
    this.#room = window.matchMedia(room);
    this.#onChange = onChange;
    this.#settle = settle;
    toggle.addEventListener("click", () => this.set(!this.isOpen));
    element.querySelector(".drawer-close").addEventListener("click", () => this.set(false));
    element.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !this.covers) return;
      event.stopPropagation();
      this.set(false);
    });
    this.#room.addEventListener("change", () => this.#apply(this.#room.matches));
    this.#apply(this.#room.matches);
  }

  /** Whether it lies over the conversation. */
  get covers() {
    return this.isOpen && !this.#room.matches;
  }

  /** Opens or closes it, and takes the focus along. */
  set(open) {
    if (open === this.isOpen) return;
    const held = this.element.contains(document.activeElement);
    this.#apply(open);
    if (this.covers) this.element.querySelector(".drawer-close").focus();
    else if (held) this.#toggle.focus();
  }

  #apply(open) {
    this.isOpen = open;
    this.element.classList.toggle("open", open);
    this.element.classList.toggle("shut", !open);
    this.element.classList.toggle("covers", this.covers);
    this.#toggle.setAttribute("aria-expanded", String(open));
    this.#settle();
    this.#onChange(open);
  }
}
