// Stores conversations in this browser only: each under its own key, and an index of all.

import { Conversation } from "./conversation.js";

const INDEX = "tidewheel.conversations";
const ITEM = "tidewheel.conversation.";
const MAX_CONVERSATIONS = 100;
const MAX_CHARACTERS = 4_000_000; // browsers allow a site about five million

/** `localStorage` or `sessionStorage`. If the browser allows neither, a storage that lasts while the page is open. */
export function openStorage(name) {
  try {
    const storage = window[name];
    storage.setItem("tidewheel.probe", "");
    storage.removeItem("tidewheel.probe");
    return storage;
  } catch {
    const values = new Map();
    return {
      getItem: (key) => values.get(key) ?? null,
      setItem: (key, value) => values.set(key, value),
      removeItem: (key) => values.delete(key),
    };
  }
}

export class History {
  #storage;

  constructor(storage) {
    this.#storage = storage;
  }

  /** The stored conversations, latest first: [{id, title, updated, size}, ...]. */
  list() {
    const index = this.#read(INDEX);
    return Array.isArray(index) ? index.sort((a, b) => b.updated - a.updated) : [];
  }

  /** A conversation, or null if it is no longer stored. */
  load(id) {
    const kept = this.#read(ITEM + id);
    const all = kept?.all ?? kept?.messages; // conversations stored before there were branches have `messages`
    return Array.isArray(all) ? new Conversation({ ...kept, all, id }) : null;
  }

  /** The stored conversations whose title or one message has all of these words. */
  find(words) {
    const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
    if (!wanted.length) return this.list();
    return this.list().filter(({ id, title }) => {
      const said = this.load(id)?.all.map(({ content }) => content) ?? [];
      const text = [title, ...said].join("\n").toLowerCase();
      return wanted.every((word) => text.includes(word));
    });
  }

  /** Stores a conversation. If there is no space, removes the oldest ones. Returns whether it could be stored. */
  save(conversation) {
    const { id, name, title, model, updated, all, leaf } = conversation;
    const text = JSON.stringify({ name, model, updated, all, leaf });
    const others = this.list().filter((entry) => entry.id !== id);
    let size = text.length + others.reduce((sum, entry) => sum + entry.size, 0);
    while (others.length && (others.length >= MAX_CONVERSATIONS || size > MAX_CHARACTERS)) size -= this.#drop(others);
    while (size <= MAX_CHARACTERS) {
      try {
        this.#storage.setItem(ITEM + id, text);
        this.#storage.setItem(INDEX, JSON.stringify([{ id, title, updated, size: text.length }, ...others]));
        return true;
      } catch {
        if (!others.length) break;
        size -= this.#drop(others);
      }
    }
    this.#storage.removeItem(ITEM + id);
    this.#storage.setItem(INDEX, JSON.stringify(others));
    return false;
  }

  /** Removes conversations. Returns a function that restores them. */
  remove(ids) {
    const removed = ids.map((id) => this.load(id)).filter(Boolean);
    const gone = new Set(ids);
    this.#storage.setItem(INDEX, JSON.stringify(this.list().filter((entry) => !gone.has(entry.id))));
    for (const id of ids) this.#storage.removeItem(ITEM + id);
    return () => removed.forEach((conversation) => this.save(conversation));
  }

  #drop(entries) {
    const oldest = entries.pop();
    this.#storage.removeItem(ITEM + oldest.id);
    return oldest.size;
  }

  #read(key) {
    try {
      return JSON.parse(this.#storage.getItem(key));
    } catch {
      return null;
    }
  }
}
