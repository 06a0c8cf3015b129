// The form of request parameters. Its values go into requests, and are stored in this browser.

const KEPT = "tidewheel.parameters";
const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed",
  "repetition_penalty", "presence_penalty", "frequency_penalty",
];
const OURS = ["messages", "stream", "stream_options", "n"];

export class Parameters {
  #form;
  #storage;

  constructor(form, storage) {
    this.#form = form;
    this.#storage = storage;
    this.#restore();
    form.addEventListener("input", (event) => {
      this.#complain(event.target, "");
      this.#keep();
    });
    form.addEventListener("reset", () => {
      for (const field of form.elements) this.#complain(field, "");
      storage.removeItem(KEPT);
    });
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  get system() {
    return this.#field("system").value;
  }

  /** The fields of a request's body. If they are not valid, shows why and returns null. */
  read() {
    for (const field of this.#form.elements) this.#complain(field, "");
    const body = {};
    for (const name of NUMBERS) {
      const field = this.#field(name);
      if (field.value) body[name] = Number(field.value);
    }
    const stop = this.#field("stop").value.split("\n").filter(Boolean).map(unescaped);
    if (stop.length) body.stop = stop;
    const thinking = this.#field("thinking").value;
    if (thinking) body.chat_template_kwargs = { enable_thinking: thinking === "on" };
    const tools = this.#json("tools", Array.isArray, "a list of tools");
    if (tools?.length) body.tools = tools;
    const extra = this.#json("extra", (value) => typeof value === "object" && !Array.isArray(value), "an object");
    const taken = Object.keys(extra ?? {}).find((name) => OURS.includes(name));
    if (taken) this.#complain(this.#field("extra"), `${taken} is set by this page`);
    Object.assign(body, extra);
    return this.#check() ? body : null;
  }

  /** Shows the server's message about a parameter, if the form has it. */
  refuse(name, message) {
    const field = this.#form.elements.namedItem(name.split(/[.[]/)[0]);
    if (!field) return;
    this.#complain(field, message);
    this.#point(field);
  }

  #field(name) {
    return this.#form.elements.namedItem(name);
  }

  #json(name, fits, what) {
    const field = this.#field(name);
    if (!field.value.trim()) return null;
    let value = null;
    try {
      value = JSON.parse(field.value);
    } catch (error) {
      this.#complain(field, `not JSON: ${error.message}`);
      return null;
    }
    if (value !== null && fits(value)) return value;
    this.#complain(field, `must be ${what}`);
    return null;
  }

  #check() {
    const bad = [...this.#form.elements].find((field) => field.validity && !field.validity.valid);
    if (!bad) return true;
    if (!bad.validity.customError) this.#complain(bad, bad.validationMessage);
    this.#point(bad);
    return false;
  }

  /** Focuses a field whose value is not valid. */
  #point(field) {
    const fold = field.closest("details");
    if (fold) fold.open = true;
    this.#form.dispatchEvent(new CustomEvent("fault"));
    field.focus();
  }

  #complain(field, message) {
    if (!field.setCustomValidity || !field.name) return;
    const label = field.closest(".field");
    const old = label.querySelector(".complaint");
    if (!message && !old) return;
    field.setCustomValidity(message);
    field.setAttribute("aria-invalid", String(Boolean(message)));
    const note = old ?? document.createElement("small");
    note.className = "complaint";
    note.setAttribute("role", "alert");
    note.textContent = message;
    if (message) label.append(note);
    else note.remove();
  }

  #keep() {
    const values = [...this.#form.elements].filter((field) => field.name && field.value);
    const kept = JSON.stringify(Object.fromEntries(values.map((field) => [field.name, field.value])));
    try {
      this.#storage.setItem(KEPT, kept);
    } catch {
      // The browser has no storage left: the values last while the page is open.
    }
  }

  #restore() {
    let kept;
    try {
      kept = JSON.parse(this.#storage.getItem(KEPT)) ?? {};
    } catch {
      return;
    }
    for (const field of this.#form.elements) if (typeof kept[field.name] === "string") field.value = kept[field.name];
    const fold = this.#form.querySelector("details");
    fold.open = [...fold.querySelectorAll("textarea")].some((field) => field.value);
  }
}

function unescaped(line) {
  return line.replace(/\\([nrt\\])/g, (_, char) => ({ n: "\n", r: "\r", t: "\t", "\\": "\\" })[char]);
}
