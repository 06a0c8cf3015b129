// Formulas. KaTeX turns them into elements, never into markup. It is loaded only when there is a formula.

import { h } from "./dom.js";

const MAX_CHARACTERS = 2000;
const MAX_ELEMENTS = 5000;
const MAX_DEPTH = 150; // of elements; browsers lay out recursively, and some thousands are too many
const FOLDER = new URL("vendor/katex/", import.meta.url);
// `trust` false refuses links, pictures and styles. The sizes that a formula may set are bounded, in em.
const OPTIONS = { throwOnError: true, strict: "ignore", trust: false, maxExpand: 200, maxSize: 20 };

let katex;
let turn = Promise.resolve(); // one formula at a time, so that long conversations do not block the page

/** Sets the formulas of the .math elements under `root`. A formula that cannot be parsed stays as text. */
export function setFormulas(root) {
  for (const element of root.querySelectorAll(".math")) turn = turn.then(() => set(element)).catch(() => {});
  return turn;
}

/** A formula's element. It shows the text with its delimiters until the formula is set. */
export function formula(text) {
  return h("code", { class: "math" }, text);
}

async function set(element) {
  const [, open, text] = /^(\\\(|\\\[|\$\$?)([^]*?)(?:\\\)|\\\]|\$\$?)$/.exec(element.textContent) ?? [];
  if (!open || text.length > MAX_CHARACTERS) return;
  katex ??= load();
  const { render } = await katex;
  const display = open === "$$" || open === "\\[";
  const drawn = h("span", { class: display ? "formula display" : "formula" });
  render(text, drawn, { ...OPTIONS, displayMode: display });
  if (isSmall(drawn)) element.replaceWith(drawn);
}

function isSmall(root) {
  const elements = root.getElementsByTagName("*");
  if (elements.length > MAX_ELEMENTS) return false;
  const depths = new Map([[root, 0]]);
  for (const element of elements) depths.set(element, depths.get(element.parentNode) + 1);
  return Math.max(...depths.values()) <= MAX_DEPTH;
}

async function load() {
  const link = h("link", { rel: "stylesheet", href: new URL("katex.css", FOLDER).href });
  document.head.append(link);
  await Promise.all([
    import(new URL("katex.js", FOLDER).href),
    new Promise((resolve) => (link.onload = link.onerror = resolve)),
  ]);
  return globalThis.katex;
}
