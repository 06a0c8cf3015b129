// Small charts in SVG. Colours come from the style sheet, by class.

import { svg } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 60;
const SPAN_MS = 120_000;
const BLADES = 14;

/** The last two minutes of a few values. `series` are {key, class}, where class has area, line, step or dots in it. */
export class Chart {
  #series;
  #floor;
  #paths;

  constructor(element, series, floor) {
    this.#series = series;
    this.#floor = floor;
    this.#paths = series.map((one) => svg("path", { class: one.class, "vector-effect": "non-scaling-stroke" }));
    element.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    element.setAttribute("preserveAspectRatio", "none");
    const base = { class: "base", d: `M0 ${HEIGHT - 1}H${WIDTH}`, "vector-effect": "non-scaling-stroke" };
    element.append(svg("path", base), ...this.#paths);
  }

  /** Draws readings ({at, ...}, oldest first) as they are at `now`; a null ends a line. Returns the highest value. */
  draw(readings, now) {
    const seen = readings.filter((reading) => now - reading.at <= SPAN_MS);
    const values = seen.flatMap((reading) => this.#series.map(({ key }) => reading[key] ?? 0));
    const highest = Math.max(0, ...values);
    const top = 1.1 * Math.max(this.#floor, highest);
    const x = (at) => (WIDTH - 3 - ((now - at) / SPAN_MS) * WIDTH).toFixed(1);
    const y = (value) => (HEIGHT - 2 - (value / top) * (HEIGHT - 4)).toFixed(1);
    this.#series.forEach(({ key, class: kind }, i) => {
      const runs = [[]];
      for (const reading of seen) {
        if (reading[key] === null) runs.push([]);
        else runs.at(-1).push([x(reading.at), y(reading[key])]);
      }
      const drawn = runs.filter((run) => run.length).map((run) => shapeOf(run, kind));
      this.#paths[i].setAttribute("d", drawn.join(""));
    });
    return highest;
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
