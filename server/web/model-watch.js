// Reads the states of models again while someone looks at them, or waits for one.

/**
 * `read` is async and reads them. `every` is for how many milliseconds they are good, or null as long as nobody needs
 * them. While the page is hidden, nothing is read.
 */
export class ModelWatch {
  #read;
  #every;
  #timer;
  #turn = 0; // late readings of earlier turns start no timer

  constructor(read, every) {
    this.#read = read;
    this.#every = every;
    document.addEventListener("visibilitychange", () => this.poke());
  }

  /** Reads now, because something has just begun or ended. */
  async poke() {
    clearTimeout(this.#timer);
    const turn = (this.#turn += 1);
    if (document.visibilityState !== "visible") return;
    try {
      await this.#read();
    } catch {
      // The chat and the operator's view say if the server does not respond. The next reading may succeed.
    }
    if (turn === this.#turn) this.plan();
  }

  /** Reads as soon as what is known now is no longer good. */
  plan() {
    clearTimeout(this.#timer);
    const wait = this.#every();
    if (wait !== null) this.#timer = setTimeout(() => this.poke(), wait);
  }
}
