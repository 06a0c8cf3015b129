// Files attached to a message: texts, and images for models that see them.

import { readImage } from "./images.js";

const MAX_FILES = 10;
const MAX_BYTES = 256 * 1024; // of all files of a message
const MAX_NAME = 100;

/**
 * The files chosen for the next message, shown in `list`. `takesImages` says whether the model sees images, and
 * `onRefuse` gets the reason why files were refused.
 */
export class Attachments {
  #files = []; // {name, text}, or {name, url} of images
  #adding = Promise.resolve(); // one file after another: each is counted before the next is accepted
  #list;
  #show;
  #takesImages;
  #onRefuse;

  /** `show(file, remove)` creates a file's entry. */
  constructor(list, show, takesImages, onRefuse) {
    this.#list = list;
    this.#show = show;
    this.#takesImages = takesImages;
    this.#onRefuse = onRefuse;
  }

  /** Adds texts and images. */
  add(chosen) {
    const files = [...chosen]; // the browser empties a list of dropped files when its event ends
    this.#adding = this.#adding.then(() => this.#add(files));
    return this.#adding;
  }

  async #add(files) {
    const refused = [];
    for (const file of files) {
      try {
        const name = tidyName(file.name);
        if (this.#files.length >= MAX_FILES) throw new Error(`${name} was not added: a message can have ${MAX_FILES} files`);
        if (file.type.startsWith("image/")) {
          if (!this.#takesImages()) throw new Error(`${name} was not added: this model does not see images`);
          this.#files.push(await readImage(file, name));
          continue;
        }
        const size = this.#files.reduce((sum, { text = "" }) => sum + text.length, file.size);
        if (size > MAX_BYTES) throw new Error(`${name} is too large: the files of a message can have 256 KiB together`);
        this.#files.push({ name, text: await textOf(file, name) });
      } catch (error) {
        refused.push(error.message);
      }
    }
    if (refused.length) this.#onRefuse(refused.join("; "));
    this.#draw();
  }

  /** The chosen files as {files, images}; either is undefined if there are none. */
  get chosen() {
    const only = (field) => {
      const found = this.#files.filter((file) => field in file);
      return found.length ? found : undefined;
    };
    return { files: only("text"), images: only("url") };
  }

  clear() {
    this.#files = [];
    this.#draw();
  }

  #draw() {
    this.#list.replaceChildren(...this.#files.map((file) => this.#show(file, () => {
      this.#files = this.#files.filter((other) => other !== file);
      this.#draw();
    })));
    this.#list.hidden = !this.#files.length;
  }
}

/** A message's text for the model: its files first, each in a code fence that the file cannot close. */
export function withFiles({ content, files = [] }) {
  const parts = files.map(({ name, text }) => {
    const longest = Math.max(2, ...Array.from(text.matchAll(/`+/g), ([run]) => run.length));
    const fence = "`".repeat(longest + 1);
    return `File ${name}:\n${fence}\n${text}\n${fence}`;
  });
  return [...parts, content].filter(Boolean).join("\n\n");
}

/** A file's name on one line, without characters that could pass for something else. */
export function tidyName(name) {
  return name.replace(/[\p{C}\p{Z}`]+/gu, " ").trim().slice(0, MAX_NAME) || "file";
}

async function textOf(file, name) {
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${name} is not a text file in UTF-8`);
  }
  if (text.includes("\0")) throw new Error(`${name} is not a text file in UTF-8`);
  return text;
}
