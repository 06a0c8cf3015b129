// Asks the user for the API key when the server has requested one.

export class KeyDialog {
  #dialog;
  #input;
  #note;
  #server;
  #retries = [];

  /** `onChange` is called when the key has changed. */
  constructor({ dialog, form, input, note, cancel }, server, onChange) {
    this.#dialog = dialog;
    this.#input = input;
    this.#note = note;
    this.#server = server;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      server.key = input.value.trim();
      const retries = this.#retries;
      dialog.close();
      onChange();
      for (const retry of retries) retry();
    });
    cancel.addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => {
      input.value = "";
      this.#retries = [];
    });
  }

  /** Asks for a key, and calls `retry` when there is one to try. */
  ask(retry) {
    this.#retries.push(retry);
    if (this.#dialog.open) return;
    this.#note.textContent = this.#server.key
      ? "It did not accept your last key."
      : "The key is kept for this tab only, until the tab is closed.";
    this.#dialog.showModal();
    this.#input.focus();
  }
}
