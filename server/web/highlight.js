// Colours for code. The code stays one text node: colours are ranges over it, which the style sheet paints.

const MAX_CHARACTERS = 30_000;
const OFTEN_MS = 300;
const LANGUAGES = new Map();
for (const names of [
  "bash sh zsh console", "c h", "cpp c++ cc hpp cxx", "csharp cs c#", "css scss", "diff patch", "dockerfile docker",
  "go golang", "ini toml conf", "java", "javascript js jsx mjs", "json jsonc json5", "kotlin kt", "lua",
  "makefile make", "markdown md", "php", "python py python3", "r", "ruby rb", "rust rs", "shell shellsession",
  "sql", "swift", "typescript ts tsx", "xml html svg vue", "yaml yml",
]) {
  const [language, ...others] = names.split(" ");
  for (const name of [language, ...others]) LANGUAGES.set(name, language);
}
const GROUPS = {
  keyword: "keyword literal doctag selector-tag tag operator",
  string: "string regexp addition link code char",
  comment: "comment quote",
  number: "number symbol bullet",
  name: "title name section function class selector-id selector-class",
  type: "type built_in attr attribute property variable template-variable meta",
  deletion: "deletion",
};
const GROUP_OF = new Map(Object.entries(GROUPS).flatMap(([group, scopes]) =>
  scopes.split(" ").map((scope) => [scope, group])));

/** Collects highlight.js's results as [start, end, group] instead of markup. A nested part has its own group. */
class Runs {
  list = [];
  length = 0;
  #open = [];
  startScope = this.openNode;
  endScope = this.closeNode;

  openNode(scope) {
    this.#open.push(GROUP_OF.get(String(scope).split(".")[0]) ?? this.#open.at(-1));
  }

  closeNode() {
    this.#open.pop();
  }

  addText(text) {
    const group = this.#open.at(-1);
    if (group) this.list.push([this.length, this.length + text.length, group]);
    this.length += text.length;
  }

  __addSublanguage(inner) {
    for (const [start, end, group] of inner.list) this.list.push([this.length + start, this.length + end, group]);
    this.length += inner.length;
  }

  closeAllNodes() {}

  finalize() {}

  toHTML() {
    return "";
  }
}

let core;
const grammars = new Map();
const painted = new Map(); // [highlight, range] by text node
const waiting = new Map(); // timers by text node
let turn = Promise.resolve(); // one piece of code at a time, so that long conversations do not block the page

/** Colours the text node `code`, if `language` is known and the browser supports highlights. */
export function colour(code, language) {
  const name = CSS.highlights && LANGUAGES.get(language.toLowerCase());
  clearTimeout(waiting.get(code));
  waiting.delete(code);
  if (name) turn = turn.then(() => paint(code, name)).catch((error) => console.warn(`no colours: ${error.message}`));
  return turn;
}

/** Colours code that still grows, from time to time. */
export function colourSoon(code, language) {
  if (!waiting.has(code)) waiting.set(code, setTimeout(() => colour(code, language), OFTEN_MS));
}

/** Removes the colours of all code, because it is no longer shown. */
export function forgetColours() {
  for (const code of painted.keys()) clear(code);
  for (const timer of waiting.values()) clearTimeout(timer);
  waiting.clear();
}

async function paint(code, name) {
  const highlighter = await load(name);
  await new Promise((resolve) => setTimeout(resolve));
  clear(code);
  if (!code.isConnected || code.length > MAX_CHARACTERS) return;
  const runs = highlighter.highlight(code.data, { language: name, ignoreIllegals: true })._emitter.list;
  painted.set(code, runs.map(([startOffset, endOffset, group]) => {
    const range = new StaticRange({ startContainer: code, startOffset, endContainer: code, endOffset });
    highlightOf(group).add(range);
    return [group, range];
  }));
}

async function load(name) {
  core ??= import("./vendor/highlight/core.js").then(({ default: highlighter }) => {
    highlighter.configure({ __emitter: Runs });
    return highlighter;
  });
  if (!grammars.has(name)) {
    const add = async () => (await core).registerLanguage(name, (await import(grammarPath(name))).default);
    grammars.set(name, add());
  }
  await grammars.get(name);
  return core;
}

function grammarPath(name) {
  return new URL(`vendor/highlight/languages/${name}.js`, import.meta.url).href;
}

function highlightOf(group) {
  const name = `code-${group}`;
  if (!CSS.highlights.has(name)) CSS.highlights.set(name, new Highlight());
  return CSS.highlights.get(name);
}

function clear(code) {
  for (const [group, range] of painted.get(code) ?? []) highlightOf(group).delete(range);
  painted.delete(code);
}
