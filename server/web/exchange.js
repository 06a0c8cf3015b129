// Exports conversations to a file, and imports them with strict checks.

import { Conversation } from "./conversation.js";
import { isImageUrl } from "./images.js";

const FORMAT = "tidewheel.conversations";
const MAX_BYTES = 8_000_000;
const MAX_CONVERSATIONS = 100;
const MAX_MESSAGES = 10_000;
const ROLES = ["user", "assistant", "tool"];

/** Offers conversations as a download. */
export function exportFile(conversations) {
  const kept = conversations.map(({ name, model, updated, all, leaf }) => ({ name, model, updated, all, leaf }));
  const text = JSON.stringify({ format: FORMAT, version: 1, conversations: kept }, null, 1);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = `tidewheel-${new Date().toISOString().slice(0, 10)}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** The conversations in a file from `exportFile`. Throws an Error that says what is wrong with the file. */
export async function importFile(file) {
  if (file.size > MAX_BYTES) throw new Error("The file is larger than 8 MB.");
  let data;
  try {
    data = JSON.parse(await file.text());
  } catch {
    throw new Error("The file is not JSON.");
  }
  if (data?.format !== FORMAT || data.version !== 1 || !Array.isArray(data.conversations)) {
    throw new Error("The file holds no conversations of this page.");
  }
  if (data.conversations.length > MAX_CONVERSATIONS) throw new Error("The file holds more than 100 conversations.");
  return data.conversations.map(checkedConversation);
}

function checkedConversation(value) {
  const all = list(value?.all, MAX_MESSAGES, (message, i) => checkedMessage(message, i));
  const leaf = index(value.leaf, all.length);
  const updated = Number.isFinite(value.updated) ? value.updated : Date.now();
  const { id } = Conversation.create(); // a new id, so that no stored conversation is overwritten
  const model = value.model === undefined ? undefined : string(value.model);
  return new Conversation({ id, name: string(value.name ?? ""), model, updated, all, leaf });
}

/** A message with only the known fields, each of the right type. Its parent is an earlier message. */
function checkedMessage(value, i) {
  const role = ROLES.find((one) => one === value?.role) ?? fail();
  const message = { role, content: string(value.content), parent: index(value.parent, i) };
  if (role === "tool") return { ...message, call: string(value.call), name: string(value.name) };
  if (role === "user") {
    if (value.files !== undefined) message.files = list(value.files, 10, (file) => strings(file, ["name", "text"]));
    if (value.images !== undefined) message.images = list(value.images, 10, checkedImage);
    return message;
  }
  for (const name of ["reasoning", "model", "error", "ended"]) if (value[name] !== undefined) message[name] = string(value[name]);
  if (value.calls !== undefined) {
    message.calls = list(value.calls, 1000, (call) => strings(call, ["id", "name", "arguments"]));
  }
  if (value.stats !== undefined) message.stats = numbers(value.stats, ["tokens", "firstToken", "seconds"]);
  if (value.usage !== undefined) message.usage = numbers(value.usage, ["total_tokens"]);
  return message;
}

function checkedImage(value) {
  const image = strings(value, ["name", "url"]);
  return isImageUrl(image.url) ? image : fail();
}

function list(value, most, check) {
  if (!Array.isArray(value) || value.length > most) fail();
  return value.map(check);
}

function string(value) {
  return typeof value === "string" ? value : fail();
}

function strings(value, names) {
  return Object.fromEntries(names.map((name) => [name, string(value?.[name])]));
}

function numbers(value, names) {
  return Object.fromEntries(names.map((name) => [name, Number.isFinite(value?.[name]) ? value[name] : fail()]));
}

function index(value, end) {
  return Number.isInteger(value) && value >= -1 && value < end ? value : fail();
}

function fail() {
  throw new Error("The file holds a conversation that cannot be read.");
}
