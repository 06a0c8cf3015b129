// Markdown that is still being written. Complete blocks are drawn once. Only the open block is drawn again, and open
// code just grows. The resulting nodes do not depend on how the text is cut into pieces.

import {
  FENCE, HEADING, LIST_ITEM, QUOTE, RULE, closesFence, fencedBlock, grow, interruptsWithFence, interruptsWithList,
  outdent, renderBlocks,
} from "./markdown.js";

// A line that so far has only these characters may still become anything, so it is not shown yet.
const UNDECIDED = /^\s*(?:[-*+#>`~|_=$]+|\\\[?|\d{1,9}[.)]?)?\s*$/;
const MAY_CLOSE_FENCE = /^\s*[`~$\\\]]*\s*$/;

/**
 * Draws Markdown into `parent`. `onBlock` is called with the text and the node of each complete block, `onCode` with the
 * text node and the language of code that has grown.
 */
export class MarkdownStream {
  #parent;
  #onBlock;
  #onCode;
  #partial = ""; // the unfinished line
  #lines = []; // of the open block
  #nodes = []; // of the open block, as last drawn
  #fence = null; // the open fence, in the block or in a list item
  #block = null; // the open code block or formula
  #codeLines = 0;
  #codeShown = 0; // number of characters shown of its last line

  constructor(parent, onBlock = () => {}, onCode = () => {}) {
    this.#parent = parent;
    this.#onBlock = onBlock;
    this.#onCode = onCode;
  }

  /** Draws more text. */
  append(text) {
    const lines = (this.#partial + text).split("\n");
    this.#partial = lines.pop();
    for (const line of lines) this.#take(line.replace(/\r$/, ""));
    this.#drawOpen();
  }

  /** Draws what was held back. Call it when there is no more text. */
  finish() {
    if (this.#partial) this.#take(this.#partial.replace(/\r$/, ""));
    this.#partial = "";
    this.#close();
  }

  #take(line) {
    if (this.#block) {
      if (closesFence(this.#fence, line)) this.#close();
      else this.#showCode(line, true);
      return;
    }
    if (this.#beginsBlock(line)) this.#close();
    if (!this.#lines.length) {
      if (!line.trim()) return;
      const fence = FENCE.exec(line);
      if (fence && fence[1].length < 4) {
        this.#block = fencedBlock(fence);
        this.#replace([this.#block.element]);
        this.#fence = fence;
        return;
      }
    }
    this.#lines.push(line);
    if (!this.#fence) this.#fence = this.#isList() ? FENCE.exec(LIST_ITEM.exec(line)?.[3] ?? line) : null;
    else if (closesFence(this.#fence, line)) this.#fence = null;
  }

  #isList() {
    return LIST_ITEM.test(this.#lines[0]) && !RULE.test(this.#lines[0]);
  }

  /** Whether `line` starts a new block instead of continuing the open one. */
  #beginsBlock(line) {
    if (!this.#lines.length || this.#fence) return false;
    if (this.#isList()) {
      if (!line.trim() || /^\s\s/.test(line) || (LIST_ITEM.test(line) && !RULE.test(line))) return false;
      const loose = !this.#lines.at(-1).trim();
      return loose || [FENCE, HEADING, RULE, QUOTE].some((kind) => kind.test(line));
    }
    const ended = !line.trim() || HEADING.test(this.#lines[0]) || RULE.test(this.#lines[0]);
    return ended || HEADING.test(line) || RULE.test(line) || interruptsWithFence(line, this.#lines) ||
      interruptsWithList(line);
  }

  #drawOpen() {
    const partial = this.#partial.replace(/\r$/, "");
    if (this.#block) {
      if (!MAY_CLOSE_FENCE.test(partial)) this.#showCode(partial, false);
      this.#onCode(this.#block.code, this.#block.language);
      return;
    }
    const shown = UNDECIDED.test(partial) ? [] : [partial];
    if (!this.#lines.length && !shown.length) return;
    const drawn = document.createDocumentFragment();
    if (shown.length && this.#beginsBlock(partial)) {
      renderBlocks(this.#lines, drawn);
      renderBlocks(shown, drawn);
    } else renderBlocks([...this.#lines, ...shown], drawn);
    this.#replace([...drawn.childNodes]);
  }

  #showCode(line, whole) {
    const text = (this.#codeLines ? "\n" : "") + outdent(line, this.#fence[1].length);
    grow(this.#block, text.slice(this.#codeShown));
    this.#codeShown = whole ? 0 : text.length;
    if (whole) this.#codeLines += 1;
  }

  #close() {
    if (!this.#block) {
      if (!this.#lines.length) return;
      const drawn = document.createDocumentFragment();
      renderBlocks(this.#lines, drawn);
      this.#replace([...drawn.childNodes]);
    }
    for (const node of this.#nodes) this.#onBlock(node.textContent, node);
    this.#lines = [];
    this.#nodes = [];
    this.#fence = null;
    this.#block = null;
    this.#codeLines = this.#codeShown = 0;
  }

  #replace(nodes) {
    for (const node of this.#nodes) node.remove();
    this.#parent.append(...nodes);
    this.#nodes = nodes;
  }
}
