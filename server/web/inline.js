// Inline Markdown as DOM nodes: code, emphasis, links, escapes. Takes linear time for any text.

import { h } from "./dom.js";
import { formula } from "./math.js";

const MAX_DEPTH = 8;
const SPECIAL = /[\\`*_~[!<h&$\n]/g;
const LINK =
  /!?\[((?:[^[\]\\]|\\[^]|\[[^[\]]*\])*)\]\(\s?(<[^<>\n]*>|[^\s()<>]*(?:\([^\s()]*\)[^\s()]*)*)(?:\s"[^"\n]*")?\s?\)/y;
const ANGLE_LINK = /<(https?:\/\/[^\s<>]+)>/y;
const BARE_LINK = /https?:\/\/[^\s<>"'`]+/y;
const ESCAPED = /[\\`*_{}#+\-.!|~>$]/;
const ENTITIES = { "&lt;": "<", "&gt;": ">", "&amp;": "&", "&quot;": '"', "&#39;": "'", "&nbsp;": "\u00a0" };
const ENTITY = /&(?:lt|gt|amp|quot|#39|nbsp);/y;
const EMPHASIS = { "**": "strong", __: "strong", "~~": "del", "*": "em", _: "em" };
const WORD = /[\p{L}\p{N}]/u;
const WORD_OR_DOLLAR = /[\p{L}\p{N}$]/u;

/** Appends `text` to `parent`. `links` false keeps a link from containing another one. */
export function renderInline(text, parent, depth = 0, links = true) {
  if (depth >= MAX_DEPTH) {
    parent.append(text);
    return;
  }
  let plain = "";
  let at = 0;
  const closers = new Map(); // the position of the next closer of each kind, so that none is searched twice
  const flush = () => {
    if (plain) parent.append(plain);
    plain = "";
  };
  const put = (node, end) => {
    flush();
    parent.append(node);
    at = end;
  };
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const next = SPECIAL.exec(text)?.index ?? text.length;
    plain += text.slice(at, next);
    at = next;
    if (at === text.length) break;
    const char = text[at];
    if (char === "\n") put(h("br"), at + 1);
    else if (char === "\\" && ESCAPED.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else if (!code() && !math() && !link() && !emphasis() && !entity()) {
      plain += char;
      at += 1;
    }
  }
  flush();

  function code() {
    if (text[at] !== "`") return false;
    const ticks = runLength(text, at);
    const end = closer("`".repeat(ticks), at + ticks, (i) => text[i - 1] !== "`" && runLength(text, i) === ticks);
    if (end < 0) {
      plain += "`".repeat(ticks);
      at += ticks;
      return true;
    }
    const body = text.slice(at + ticks, end).replaceAll("\n", " ");
    const padded = body.startsWith(" ") && body.endsWith(" ") && body.trim();
    put(h("code", {}, padded ? body.slice(1, -1) : body), end + ticks);
    return true;
  }

  function math() {
    const close = { "\\(": "\\)", "\\[": "\\]", $$: "$$" }[text.slice(at, at + 2)];
    if (!close) return text[at] === "$" && dollars();
    const end = closer(close, at + 2, () => true);
    if (end < 0) return false;
    put(formula(text.slice(at, end + 2)), end + 2);
    return true;
  }

  // A formula between single dollars, if these cannot be amounts of money.
  function dollars() {
    if (!/[^\s$]/.test(text[at + 1] ?? "") || WORD_OR_DOLLAR.test(text[at - 1] ?? "")) return false;
    const end = closer("$", at + 2, (i) => /[^\s\\]/.test(text[i - 1]) && !WORD_OR_DOLLAR.test(text[i + 1] ?? ""));
    if (end < 0) return false;
    put(formula(text.slice(at, end + 1)), end + 1);
    return true;
  }

  function link() {
    let match;
    if (text[at] === "[" || text[at] === "!") {
      if ((match = matchAt(LINK))) {
        const anchor = links && anchorTo(match[2].replace(/^<|>$/g, ""));
        if (!anchor) return false;
        renderInline(match[1], anchor, depth + 1, false);
        put(anchor, at + match[0].length);
        return true;
      }
    } else if (text[at] === "<") {
      const anchor = links && (match = matchAt(ANGLE_LINK)) && anchorTo(match[1]);
      if (!anchor) return false;
      anchor.append(match[1]);
      put(anchor, at + match[0].length);
      return true;
    } else if (text[at] === "h" && links && !WORD.test(text[at - 1] ?? "") && (match = matchAt(BARE_LINK))) {
      const url = withoutTail(match[0]);
      const anchor = anchorTo(url);
      if (!anchor) return false;
      anchor.append(url);
      put(anchor, at + url.length);
      return true;
    }
    return false;
  }

  function emphasis() {
    const marker = [text.slice(at, at + 2), text[at]].find((m) => m in EMPHASIS);
    if (!marker) return false;
    const size = marker.length;
    const underscores = marker[0] === "_";
    const opens = /\S/.test(text[at + size] ?? "") && !(underscores && WORD.test(text[at - 1] ?? ""));
    const closes = (i) =>
      /\S/.test(text[i - 1]) &&
      !(underscores && WORD.test(text[i + size] ?? "")) &&
      (size === 2 || (text[i + 1] !== marker && text[i - 1] !== marker));
    let end = opens ? closer(marker, at + size + 1, closes) : -1;
    if (end < 0) {
      plain += marker;
      at += size;
      return true;
    }
    const inner = text.slice(at + size, end);
    if (size === 2 && text[end + 2] === marker[0] && inner.split(marker[0]).length % 2 === 0) end += 1; // ***both***
    const node = h(EMPHASIS[marker]);
    renderInline(text.slice(at + size, end), node, depth + 1, links);
    put(node, end + size);
    return true;
  }

  function entity() {
    const match = text[at] === "&" && matchAt(ENTITY);
    if (!match) return false;
    plain += ENTITIES[match[0]];
    at += match[0].length;
    return true;
  }

  function matchAt(pattern) {
    pattern.lastIndex = at;
    return pattern.exec(text);
  }

  /** The next position, from `from` on, where `marker` may close, or -1. */
  function closer(marker, from, closes) {
    const known = closers.get(marker);
    if (known !== undefined && (known < 0 || known >= from)) return known;
    let found = text.indexOf(marker, from);
    while (found >= 0 && !closes(found)) found = text.indexOf(marker, found + 1);
    closers.set(marker, found);
    return found;
  }
}

/** A link that opens in a new tab and sends no referrer; null for other schemes than http(s). */
function anchorTo(url) {
  let parsed;
  try {
    parsed = new URL(url);
  } catch {
    return null;
  }
  if (parsed.protocol !== "https:" && parsed.protocol !== "http:") return null;
  return h("a", { href: parsed.href, target: "_blank", rel: "noopener noreferrer nofollow", title: parsed.href });
}

/** An address within a sentence, without the sentence's punctuation. */
function withoutTail(url) {
  let end = url.length;
  let extra = url.split(")").length - url.split("(").length;
  while (".,;:!?*_~".includes(url[end - 1]) || (url[end - 1] === ")" && extra-- > 0)) end -= 1;
  return url.slice(0, end);
}

function runLength(text, at) {
  let end = at;
  while (text[end] === text[at]) end += 1;
  return end - at;
}
