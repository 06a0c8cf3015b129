// Small SVG charts. Colours come from the style sheet, by class.

import { h, svg } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 60;
const SPAN_MS = 120_000;
const BLADES = 14;

/**
 * The last two minutes of a few values, with axes. `series` are {key, class, name}; the class contains area, line, step
 * or dots. Series with a name show their value at the pointer. `format` writes a value.
 */
export class Chart {
  #series;
  #floor;
  #format;
  #paths;
  #top = h("span", { class: "top" });
  #tip = h("p", { class: "tip", hidden: true });
  #mark = svg("path", { class: "mark-line", "vector-effect": "non-scaling-stroke" });
  #seen = [];
  #now = 0;

  constructor(element, series, floor, format) {
    this.#series = series;
    this.#floor = floor;
    this.#format = format;
    this.#paths = series.map((one) => svg("path", { class: one.class, "vector-effect": "non-scaling-stroke" }));
    const base = { class: "base", d: `M0 ${HEIGHT - 1}H${WIDTH}M0 1H${WIDTH}`, "vector-effect": "non-scaling-stroke" };
    const drawing = svg(
      "svg",
      { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("path", base), ...this.#paths, this.#mark,
    );
    const times = ["2 min ago", "1 min ago", "now"].map((words) => h("span", {}, words));
    element.append(
      h("p", { class: "y-axis" }, this.#top, h("span", {}, "0")), drawing, h("p", { class: "x-axis" }, ...times), this.#tip,
    );
    drawing.addEventListener("pointermove", (event) => this.#point(event.offsetX / drawing.clientWidth));
    drawing.addEventListener("pointerleave", () => this.#point(null));
  }

  /** Draws readings ({at, ...}, oldest first) as of `now`. A null interrupts a line. The scale also covers `figure`. */
  draw(readings, now, figure = null) {
    const seen = readings.filter((reading) => now - reading.at <= SPAN_MS);
    const values = seen.flatMap((reading) => this.#series.map(({ key }) => reading[key] ?? 0));
    const top = Math.max(this.#floor, figure ?? 0, ...values);
    const y = (value) => (HEIGHT - 1 - (value / top) * (HEIGHT - 2)).toFixed(1);
    this.#seen = seen;
    this.#now = now;
    this.#top.textContent = this.#format(top);
    this.#series.forEach(({ key, class: kind }, i) => {
      const runs = [[]];
      for (const reading of seen) {
        if (reading[key] === null) runs.push([]);
        else runs.at(-1).push([this.#x(reading.at).toFixed(1), y(reading[key])]);
      }
      const drawn = runs.filter((run) => run.length).map((run) => shapeOf(run, kind));
      this.#paths[i].setAttribute("d", drawn.join(""));
    });
  }

  #x(at) {
    return WIDTH - ((this.#now - at) / SPAN_MS) * WIDTH;
  }

  /** Shows the values of the reading nearest to `share` of the width; null shows none. */
  #point(share) {
    const distance = ({ at }) => Math.abs(this.#x(at) / WIDTH - share);
    const nearest = share === null ? null : this.#seen.reduce((a, b) => (a && distance(a) <= distance(b) ? a : b), null);
    this.#tip.hidden = !nearest;
    this.#mark.setAttribute("d", nearest ? `M${this.#x(nearest.at).toFixed(1)} 0V${HEIGHT}` : "");
    if (!nearest) return;
    const values = this.#series.filter(({ name }) => name)
      .map(({ key, name }) => `${this.#format(nearest[key])} ${name}`);
    const ago = Math.round((this.#now - nearest.at) / 1000);
    this.#tip.textContent = [...values, ago ? `${ago} s ago` : "now"].join(" · ");
    this.#tip.classList.toggle("left", share > 0.5);
  }
}

function shapeOf(run, kind) {
  if (kind.includes("dots")) return run.map(([x, y]) => `M${x} ${y}h.01`).join("");
  const step = kind.includes("step");
  const line = run.map(([x, y], i) => (i ? (step ? `H${x}V${y}` : `L${x} ${y}`) : `M${x} ${y}`)).join("");
  return kind.includes("area") ? `${line}L${run.at(-1)[0]} ${HEIGHT - 1}L${run[0][0]} ${HEIGHT - 1}Z` : line;
}

/** A wheel that stands in water up to a level between 0 and 1, and turns while there is work. */
export class WaterWheel {
  #element;
  #water;

  constructor(element) {
    this.#element = element;
    const wave = `M-80 0${"q10 -7 20 0t20 0".repeat(7)}V100H-80Z`;
    const paddles = Array.from({ length: BLADES }, (_, i) => {
      const turn = (2 * Math.PI * i) / BLADES;
      const at = (radius, lag) =>
        [Math.cos(turn + lag), Math.sin(turn + lag)].map((part) => (60 + radius * part).toFixed(2));
      return `M${at(45, 0)}Q${at(53, 0.05)} ${at(57, 0.3)}`;
    });
    const waves = ["wave back", "wave"].map((kind) => svg("path", { class: kind, d: wave }));
    this.#water = svg("g", { class: "level" }, ...waves);
    element.append(
      svg("clipPath", { id: "wheel-inside" }, svg("circle", { cx: 60, cy: 60, r: 41 })),
      svg("g", { "clip-path": "url(#wheel-inside)" }, this.#water),
      svg("g", { class: "wheel" }, svg("path", { class: "paddles", d: paddles.join("") })),
      svg("circle", { class: "rim", cx: 60, cy: 60, r: 45 }),
    );
    this.show(0, false);
  }

  show(level, turning) {
    const height = Math.min(1, Math.max(0, level));
    // At 0 the waves lie below the rim, at 1 above it.
    this.#water.style.transform = `translateY(${(105 - 92 * height).toFixed(1)}px)`;
    this.#element.classList.toggle("turning", turning);
  }
}
