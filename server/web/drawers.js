// The columns beside the conversation. On wide screens they stand beside it. On narrow ones they slide over it, keep the
// focus, and close on Escape or on a touch outside.

/** All columns of a page. While one covers the others and `rest`, those are inert. */
export class Drawers {
  #rest;
  #drawers;

  /** `columns` are [{element, toggle, room, onChange}, ...]; `room`: media query for screens that are wide enough. */
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

  /** Closes the column that covers the conversation. */
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

  /** Whether it covers the conversation. */
  get covers() {
    return this.isOpen && !this.#room.matches;
  }

  /** Opens or closes it, and moves the focus accordingly. */
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
