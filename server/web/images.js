// Images attached to a message, small enough to be kept with the conversation in the browser's storage.

import { h } from "./dom.js";

const MAX_SIDE = 1536; // pixels
const MAX_CHARACTERS = 600_000; // of a data: URL; the browser keeps some millions for all conversations
const KEPT = ["image/jpeg", "image/png", "image/webp", "image/gif"];
const QUALITIES = [0.9, 0.8, 0.7, 0.6];
const DATA = /^data:image\/(jpeg|png|webp|gif);base64,[A-Za-z0-9+/]+={0,2}$/;

/** An image file as {name, url}. A large one is shrunk. Throws an Error if the browser cannot read it. */
export async function readImage(file, name) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${name} is not an image that this browser can read`);
  }
  try {
    const fits = Math.max(bitmap.width, bitmap.height) <= MAX_SIDE && file.size * 4 / 3 < MAX_CHARACTERS - 100;
    return { name, url: fits && KEPT.includes(file.type) ? await dataUrl(file) : shrunk(bitmap, name) };
  } finally {
    bitmap.close();
  }
}

/** Whether a text is an image as this page keeps it. */
export function isImageUrl(text) {
  return text.length <= MAX_CHARACTERS && DATA.test(text);
}

/** An image as an element. */
export function picture({ name, url }) {
  return h("img", { class: "picture", src: url, alt: name, title: name });
}

/** A message's content for the API: its images before its text, if it has any. */
export function withImages(text, images = []) {
  if (!images.length) return text;
  const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

function shrunk(bitmap, name) {
  for (let side = MAX_SIDE; side >= MAX_SIDE / 8; side /= 2) {
    const scale = Math.min(1, side / Math.max(bitmap.width, bitmap.height));
    const canvas = document.createElement("canvas");
    canvas.width = Math.max(1, Math.round(bitmap.width * scale));
    canvas.height = Math.max(1, Math.round(bitmap.height * scale));
    const context = canvas.getContext("2d");
    context.fillStyle = "white"; // behind what is transparent
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.imageSmoothingQuality = "high";
    context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    for (const quality of QUALITIES) {
      const url = canvas.toDataURL("image/jpeg", quality);
      if (isImageUrl(url)) return url;
    }
  }
  throw new Error(`${name} cannot be made small enough`);
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}
