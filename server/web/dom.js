// Creates elements without parsing markup: text always becomes text nodes.

const SVG = "http://www.w3.org/2000/svg";

/** An element. `props` are attributes; functions are listeners (`onclick`), and booleans mean present or absent. */
export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** An SVG element. */
export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

/** An icon from the page's sprite. */
export function icon(name) {
  return svg("svg", { class: "icon", "aria-hidden": "true" }, svg("use", { href: `#i-${name}` }));
}

/** A button with an icon and a name, which is also its tooltip. */
export function iconButton(name, label, onclick) {
  return h("button", { type: "button", class: "icon-button", "aria-label": label, title: label, onclick }, icon(name));
}

/** The attributes that make a scrollable element reachable by keyboard. */
export function scrollable(label) {
  return { tabindex: "0", role: "group", "aria-label": label };
}

/** Copies `text`, and shows on the button that it was copied. Also works without a secure context. */
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
