// Markdown blocks as DOM nodes, of the kinds that models write. HTML is shown as text, images as links.

import { copyText, h, iconButton, scrollable } from "./dom.js";
import { renderInline } from "./inline.js";
import { formula } from "./math.js";

/** Matches a line that begins code, or a formula on separate lines. */
export const FENCE = /^(\s*)(`{3,}|~{3,}|\\\[(?=\s*$)|\$\$(?=\s*$))([^`]*)$/;
export const LIST_ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+(.*)|)$/;
export const HEADING = /^ {0,3}(#{1,6})(?:\s(.*))?$/;
export const RULE = /^ {0,3}(?:(?:-\s*){3,}|(?:\*\s*){3,}|(?:_\s*){3,})$/;
export const QUOTE = /^ {0,3}> ?(.*)$/;
const MAX_DEPTH = 8;

/** Whether `line` closes the fence that `open` (a match of FENCE) opened. */
export function closesFence(open, line) {
  const text = line.trim();
  if (isFormula(open)) return text === closerOf(open);
  return text.length >= open[2].length && text === open[2][0].repeat(text.length);
}

function isFormula(open) {
  return "\\$".includes(open[2][0]);
}

function closerOf(open) {
  return open[2] === "$$" ? "$$" : "\\]";
}

/** Whether a line may begin a list in the middle of a paragraph. */
export function interruptsWithList(line) {
  const item = LIST_ITEM.exec(line);
  return item !== null && item[3] !== undefined && !/^\d/.test(item[2].replace(/^1[.)]$/, ""));
}

/** Appends the blocks of `lines` to `parent`. */
export function renderBlocks(lines, parent, depth = 0) {
  let at = 0;
  let match;
  while (at < lines.length) {
    const line = lines[at];
    if (!line.trim()) at += 1;
    else if (depth >= MAX_DEPTH) at = paragraph();
    else if ((match = FENCE.exec(line))) at = fence(match);
    else if ((match = HEADING.exec(line))) {
      const heading = h(`h${Math.min(match[1].length + 1, 6)}`); // the page has its own h1
      renderInline((match[2] ?? "").trim().replace(/(^|\s)#+$/, "").trim(), heading);
      parent.append(heading);
      at += 1;
    } else if (RULE.test(line)) {
      parent.append(h("hr"));
      at += 1;
    } else if (QUOTE.test(line)) at = quote();
    else if (LIST_ITEM.test(line)) at = list();
    else if (startsTable(at)) at = table();
    else at = paragraph();
  }

  function fence(open) {
    let end = at + 1;
    while (end < lines.length && !closesFence(open, lines[end])) end += 1;
    const indent = open[1].length;
    const body = lines.slice(at + 1, end).map((line) => outdent(line, indent));
    const block = fencedBlock(open);
    grow(block, body.join("\n"));
    parent.append(block.element);
    return end + 1;
  }

  function quote() {
    const inner = [];
    let end = at;
    let quoted;
    for (; end < lines.length && (quoted = QUOTE.exec(lines[end])); end += 1) inner.push(quoted[1]);
    const block = h("blockquote");
    renderBlocks(inner, block, depth + 1);
    parent.append(block);
    return end;
  }

  function list() {
    const first = LIST_ITEM.exec(lines[at]);
    const base = first[1].length;
    const ordered = /\d/.test(first[2]);
    const start = ordered ? Number.parseInt(first[2], 10) : 1;
    const block = ordered ? h("ol", start === 1 ? {} : { start }) : h("ul");
    let end = at;
    while (end < lines.length) {
      const item = LIST_ITEM.exec(lines[end]);
      if (!item || RULE.test(lines[end]) || /\d/.test(item[2]) !== ordered || item[1].length >= base + 2) break;
      const content = [item[3] ?? ""];
      const indent = item[1].length + item[2].length + 1;
      end = gather(end + 1, base, indent, content);
      block.append(listItem(content));
    }
    parent.append(block);
    return end;
  }

  /** Adds lines from `end` on to `content`, as long as they belong to the item above. Returns where they end. */
  function gather(end, base, indent, content) {
    let open = FENCE.exec(content[0]);
    while (end < lines.length) {
      const line = lines[end];
      if (open) {
        if (closesFence(open, line)) open = null;
      } else if (!line.trim()) {
        let next = end + 1;
        while (next < lines.length && !lines[next].trim()) next += 1;
        if (next === lines.length || indentOf(lines[next]) < base + 2) return next;
        for (; end < next; end += 1) content.push("");
        continue;
      } else if (indentOf(line) < base + 2) {
        if (!lines[end - 1].trim() || LIST_ITEM.test(line) || HEADING.test(line) || RULE.test(line)) return end;
        if (FENCE.test(line) || QUOTE.test(line)) return end;
      } else open = FENCE.exec(line);
      content.push(outdent(line, indent));
      end += 1;
    }
    return end;
  }

  function listItem(content) {
    const item = h("li");
    const task = /^\[([ xX])\]\s+/.exec(content[0]);
    if (task) {
      content[0] = content[0].slice(task[0].length);
      const done = task[1] !== " ";
      item.className = "task";
      const label = done ? "done" : "to do";
      item.append(h("input", { type: "checkbox", disabled: true, checked: done, "aria-label": label }));
    }
    renderBlocks(content, item, depth + 1);
    // An item's only paragraph needs no space around it.
    const paragraphs = item.querySelectorAll(":scope > p");
    if (paragraphs.length === 1) paragraphs[0].replaceWith(...paragraphs[0].childNodes);
    return item;
  }

  function startsTable(row) {
    if (!lines[row].includes("|") || !lines[row + 1]?.includes("-")) return false;
    const rules = cells(lines[row + 1]);
    return rules.every((rule) => /^:?-+:?$/.test(rule)) && rules.length === cells(lines[row]).length;
  }

  function table() {
    const heads = cells(lines[at]);
    const align = cells(lines[at + 1]).map((rule) => {
      if (rule.endsWith(":")) return rule.startsWith(":") ? "center" : "end";
      return null;
    });
    const row = (texts, tag) =>
      h("tr", {}, ...heads.map((_, column) => {
        const cell = h(tag, { class: align[column], scope: tag === "th" ? "col" : null });
        renderInline(texts[column] ?? "", cell);
        return cell;
      }));
    const body = h("tbody");
    let end = at + 2;
    for (; end < lines.length && lines[end].includes("|"); end += 1) body.append(row(cells(lines[end]), "td"));
    const sheet = h("table", {}, h("thead", {}, row(heads, "th")), body);
    parent.append(h("div", { class: "table", ...scrollable("Table") }, sheet));
    return end;
  }

  function paragraph() {
    let end = at + 1;
    const ends = (line) =>
      !line.trim() || interruptsWithFence(line, lines, at, end) || HEADING.test(line) || RULE.test(line) ||
      QUOTE.test(line) || interruptsWithList(line);
    while (end < lines.length && (depth >= MAX_DEPTH || !ends(lines[end])) && !startsTable(end)) end += 1;
    const block = h("p");
    renderInline(lines.slice(at, end).map((line) => line.trim()).join("\n"), block);
    parent.append(block);
    return end;
  }
}

/** Whether `line` begins a fence below a paragraph's lines from `start` on, instead of closing a formula in them. */
export function interruptsWithFence(line, lines, start = 0, end = lines.length) {
  return FENCE.test(line) &&
    (line.trim() !== "$$" || lines.slice(start, end).join("\n").split("$$").length % 2 === 1);
}

/** Adds text to the code or the formula of a fenced block. */
export function grow({ code, tail }, text) {
  code.insertData(code.length - tail, text);
}

/** The element of the block that `open` begins, and the text node for its lines, whose last `tail` characters close it. */
export function fencedBlock(open) {
  return isFormula(open) ? formulaBlock(open) : codeBlock(open[3]);
}

function formulaBlock(open) {
  const source = formula(`${open[2]}\n\n${closerOf(open)}`);
  return { element: h("div", { class: "lines" }, source), code: source.firstChild, tail: 3, language: "" };
}

function codeBlock(info) {
  const code = document.createTextNode("");
  const language = info.trim().split(/\s/)[0];
  const copy = iconButton("copy", "Copy code", () => copyText(code.data, copy));
  const element = h(
    "figure",
    { class: "code" },
    h("figcaption", {}, h("span", {}, language || "text"), copy),
    h("pre", scrollable(language ? `${language} code` : "code"), h("code", {}, code)),
  );
  return { element, code, tail: 0, language };
}

function cells(row) {
  const inner = row.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  return inner.match(/(?:\\\||`[^`]*`|[^|])*(?:\||$)/g).slice(0, -1).map((cell) => cell.replace(/\|$/, ""))
    .map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function indentOf(line) {
  return line.length - line.trimStart().length;
}

/** `line` without up to `indent` of its leading white space. */
export function outdent(line, indent) {
  return line.slice(Math.min(indentOf(line), indent));
}
