// Elements without markup: text only ever becomes text nodes.

const SVG = "http://www.w3.org/2000/svg";

/** An element. `props` are attributes, but for functions (listeners, `onclick`) and booleans (present or absent). */
export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** An SVG element. */
export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

/** An icon of the page's sprite. */
export function icon(name) {
  return svg("svg", { class: "icon", "aria-hidden": "true" }, svg("use", { href: `#i-${name}` }));
}

/** A button of an icon and a name, which is its tooltip too. */
export function iconButton(name, label, onclick) {
  return h("button", { type: "button", class: "icon-button", "aria-label": label, title: label, onclick }, icon(name));
}

/** What makes an element that may scroll reachable by keyboard. */
export function scrollable(label) {
  return { tabindex: "0", role: "group", "aria-label": label };
}

/** Copies `text`, and shows on the button that it was done. Works without a secure context too. */
export async function copyText(text, button) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = h("textarea", { class: "sr" });
    area.value = text;
    (button.closest("dialog") ?? document.body).append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
    button.focus();
  }
  const label = button.getAttribute("aria-label");
  const glyph = button.querySelector("use");
  if (!done || label === "Copied") return;
  const was = glyph.getAttribute("href");
  glyph.setAttribute("href", "#i-check");
  button.setAttribute("aria-label", "Copied");
  setTimeout(() => {
    glyph.setAttribute("href", was);
    button.setAttribute("aria-label", label);
  }, 1500);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (typeof value === "function") element[name] = value;
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}
