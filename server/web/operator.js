// The operator's view: reads /metrics while it is visible, and reads once what is served.

import { Chart, WaterWheel } from "./chart.js";
import { showAdapters, showFacts, showModels, showReplicas, showStages } from "./facts.js";
import { count, duration, percent, rate } from "./format.js";
import { Meter } from "./metrics.js";

const SOON_MS = 250;
const BUSY_MS = 1000;
const IDLE_MS = 3000;
const MAX_READINGS = 150;
const UNKNOWN = "–";
const FIGURES = [
  "tokens-per-second", "running", "waiting", "kv-use", "first-token", "between-tokens", "prefix-hits", "acceptance-rate",
];
const CHARTED = ["tokensPerSecond", "firstToken", "running", "waiting"];

export class Operator {
  #server;
  #meter = new Meter();
  #readings = [];
  #timer;
  #open = false;
  #active = false;
  #turn = 0; // of polling: late responses of earlier turns are ignored
  #informed = null; // the model whose facts are shown
  #models;
  #last = { firstToken: null, betweenTokens: null, prefixHits: null, acceptanceRate: null };
  #charts;
  #wheel;

  constructor(server, models) {
    this.#server = server;
    this.#models = models;
    this.#charts = [
      new Chart(document.getElementById("tokens-chart"), [
        { key: "tokensPerSecond", class: "area" },
        { key: "tokensPerSecond", class: "line", name: "tokens a second" },
      ], 10, rate),
      new Chart(document.getElementById("first-token-chart"), [
        { key: "firstToken", class: "dots", name: "to the first token" },
      ], 0.05, duration),
      new Chart(document.getElementById("requests-chart"), [
        { key: "running", class: "step", name: "running" },
        { key: "waiting", class: "step second", name: "waiting" },
      ], 2, count),
    ];
    this.#wheel = new WaterWheel(document.getElementById("kv-wheel"));
    document.addEventListener("visibilitychange", () => this.#update());
  }

  get isOpen() {
    return this.#open;
  }

  /** Whether the view is on the screen. */
  set open(open) {
    this.#open = open;
    this.#update();
  }

  /** Shows the models as they are now, because the server's list was read. */
  showModels() {
    if (!this.#active) return;
    this.#showMemory();
    this.#inform();
  }

  /** Reads soon, because something has just begun or ended. */
  poke() {
    if (!this.#active) return;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#poll(), SOON_MS);
  }

  #update() {
    const wanted = this.#open && document.visibilityState === "visible";
    if (wanted === this.#active) return;
    this.#active = wanted;
    this.#meter.reset();
    if (wanted) this.#poll();
    else this.#stop();
    if (wanted) this.#inform();
  }

  // If the server is locked, this is retried when the view is opened again. Until then the state says so.
  async #inform() {
    if (!this.#models.areKnown) return;
    const { id, status } = (this.#models.areLoadedOnDemand && this.#models.current) || {};
    const wanted = JSON.stringify([id, status?.value]);
    if (this.#informed === wanted) return;
    this.#informed = wanted;
    const facts = document.getElementById("facts");
    try {
      // To ask for a model's facts would load it.
      const info = status && status.value !== "loaded" ? { model: id } : await this.#server.info(id);
      if (this.#informed === wanted) showFacts(facts, info);
    } catch (error) {
      this.#informed = null;
      facts.textContent = error.message;
    }
  }

  #showMemory() {
    const models = this.#models.areLoadedOnDemand ? this.#models.all : [];
    showModels(document.getElementById("models-tile"), models, this.#readings.at(-1) ?? {});
  }

  #stop() {
    clearTimeout(this.#timer);
    this.#turn += 1;
  }

  async #poll() {
    this.#stop();
    const turn = this.#turn;
    let wait = IDLE_MS;
    try {
      const text = await this.#server.metrics();
      if (turn !== this.#turn) return;
      const now = performance.now();
      const reading = { at: now, ...this.#meter.read(text, now) };
      this.#readings = [...this.#readings.slice(1 - MAX_READINGS), reading];
      this.#show(reading);
      if (reading.running || reading.waiting) wait = BUSY_MS;
    } catch (error) {
      if (turn !== this.#turn) return;
      this.#meter.reset();
      this.#showNothing();
      const locked = error.status === 401;
      this.#state(locked ? "locked" : "away", locked ? "needs the API key" : "no answer");
    }
    this.#timer = setTimeout(() => this.#poll(), wait);
  }

  #show(reading) {
    for (const key of Object.keys(this.#last)) this.#last[key] = reading[key] ?? this.#last[key] ?? reading.ever[key];
    const busy = reading.running > 0;
    this.#state(busy ? "busy" : "idle", busy ? "at work" : "at rest");
    put("tokens-per-second", rate(reading.tokensPerSecond));
    put("running", count(reading.running));
    put("waiting", count(reading.waiting));
    put("kv-use", percent(reading.kvUse));
    put("first-token", duration(this.#last.firstToken));
    put("between-tokens", duration(this.#last.betweenTokens));
    put("prefix-hits", percent(this.#last.prefixHits));
    put("acceptance-rate", percent(this.#last.acceptanceRate));
    document.getElementById("draft-tokens").hidden = this.#last.acceptanceRate === null;
    showAdapters(document.getElementById("adapters"), reading.adapters);
    this.#showMemory();
    showReplicas(document.getElementById("replicas"), reading);
    showStages(document.getElementById("stages"), reading.stages);
    this.#wheel.show(reading.kvUse ?? 0, busy);
    this.#draw(reading.at);
  }

  /** Nothing is known about a server that does not respond. Its earlier values are not shown. */
  #showNothing() {
    for (const key of Object.keys(this.#last)) this.#last[key] = null;
    for (const id of FIGURES) put(id, UNKNOWN);
    document.getElementById("draft-tokens").hidden = true;
    showAdapters(document.getElementById("adapters"), null);
    showReplicas(document.getElementById("replicas"), { numReplicas: null, numSilent: null, replicas: [] });
    showStages(document.getElementById("stages"), []);
    this.#wheel.show(0, false);
    const gap = { at: performance.now(), models: [], ...Object.fromEntries(CHARTED.map((key) => [key, null])) };
    this.#readings = [...this.#readings.slice(1 - MAX_READINGS), gap];
    this.#showMemory();
    this.#draw(gap.at);
  }

  /** Draws the charts. Each scale also covers the figure above it, which may be older than the drawn readings. */
  #draw(now) {
    const [tokens, firstToken, requests] = this.#charts;
    tokens.draw(this.#readings, now);
    firstToken.draw(this.#readings, now, this.#last.firstToken);
    requests.draw(this.#readings, now);
  }

  #state(state, words) {
    document.getElementById("live-state").dataset.state = state;
    put("live-state", words);
  }
}

function put(id, text) {
  document.getElementById(id).textContent = text;
}
