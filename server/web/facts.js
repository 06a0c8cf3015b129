// Describes the served model and the server.

import { count, duration, percent, rate, size } from "./format.js";
import { h } from "./dom.js";
import { stateOf } from "./model-switch.js";

/** Shows the response of /server_info as a description list. */
export function showFacts(list, info) {
  const { engine = {} } = info;
  const generates = "kv_cache_blocks" in info; // else it is for embeddings, scores or classes
  const tokens = info.kv_cache_blocks * info.kv_cache_block_size;
  const cached = engine.enable_prefix_caching === "True" ? ", prefix caching is on" : "";
  const facts = {
    Model: info.model,
    Architecture: engine.architecture,
    Weights: [engine.weights || engine.quantization || engine.dtype, size(engine.weight_bytes)].filter(Boolean).join(", "),
    Device: engine.device,
    Kernels: engine.isa,
    Stages: engine.stages,
    Replica: info.replica,
    Context: info.max_model_len && `${count(info.max_model_len)} tokens`,
    "KV cache": generates && [`${count(tokens)} tokens in ${engine.kv_cache_dtype}`, size(engine.kv_cache_bytes)].filter(Boolean)
      .join(", ") + cached,
    "Tool calls": generates && (info.tool_call_parser ?? "not read"),
    Reasoning: generates && (info.reasoning_parser ?? "not read"),
    Version: info.version,
  };
  const known = Object.entries(facts).filter(([, value]) => value);
  list.replaceChildren(...known.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

/** Shows in a tile what a pipeline's stages do, if there is one. A stage that others wait for computes all the time. */
export function showStages(tile, stages) {
  tile.hidden = stages.length === 0;
  const rows = stages.map(({ stage, computing, step, hop }) => h("tr", {},
    h("th", { scope: "row" }, `Stage ${stage}`),
    h("td", {}, percent(computing)), h("td", {}, duration(step)), h("td", {}, duration(hop)),
  ));
  tile.querySelector("tbody").replaceChildren(...rows);
}

/** Shows in a tile the names of adapters with requests, if adapters are served. */
export function showAdapters(tile, adapters) {
  tile.hidden = adapters === null;
  if (tile.hidden) return;
  const waiting = adapters.waiting.length ? `; waiting: ${adapters.waiting.join(", ")}` : "";
  tile.querySelector("p").textContent = (adapters.running.join(", ") || "none") + waiting;
}

const MOST_ROWS = 16;

/**
 * Shows in a tile which of `models` are loaded, the memory of each and what each does, if they are loaded on demand. The
 * values are those of a Meter.
 */
export function showModels(tile, models, { models: measured = [], memoryUsed, memoryBudget }) {
  tile.hidden = models.length === 0;
  if (tile.hidden) return;
  const figures = new Map(measured.map((one) => [one.model, one]));
  const shown = models.filter(({ status }) => status.value !== "unloaded");
  const loaded = models.filter(({ status }) => status.value === "loaded").length;
  const notes = [
    `${count(loaded)} of ${count(models.length)} loaded`,
    memoryUsed > 0 && `${[memoryUsed, memoryBudget].filter(Boolean).map(size).join(" of ")} in use`,
    shown.length > MOST_ROWS && `the first ${MOST_ROWS} are shown`,
  ].filter(Boolean);
  tile.querySelector("caption").textContent = `Models: ${notes.join(", ")}`;
  const rows = shown.slice(0, MOST_ROWS).map(({ id, status }) => {
    const { memory: held, running, waiting, kvUse, tokensPerSecond } = { ...NOTHING, ...figures.get(id) };
    return h("tr", {},
      h("th", { scope: "row" }, id),
      h("td", {}, stateOf(status)), h("td", {}, size(held) || "–"), h("td", {}, count(running)),
      h("td", {}, count(waiting)), h("td", {}, percent(kvUse)), h("td", {}, rate(tokensPerSecond)),
    );
  });
  tile.querySelector("tbody").replaceChildren(...rows);
}

const NOTHING = { memory: null, running: null, waiting: null, kvUse: null, tokensPerSecond: null };

/** Shows in a tile how many replicas run and what each does, if there are several. If many, only the busiest. */
export function showReplicas(tile, { numReplicas, numSilent, replicas }) {
  tile.hidden = numReplicas === null;
  if (tile.hidden) return;
  const busiest = [...replicas].sort((a, b) => b.running + b.waiting - a.running - a.waiting).slice(0, MOST_ROWS);
  const notes = [
    numSilent > 0 && `${count(numSilent)} silent`,
    busiest.length < replicas.length && `the ${MOST_ROWS} busiest are shown`,
  ].filter(Boolean);
  tile.querySelector("caption").textContent = `Replicas: ${[count(numReplicas), ...notes].join(", ")}`;
  const rows = busiest.sort((a, b) => a.replica.localeCompare(b.replica)).map((one) => h("tr", {},
    h("th", { scope: "row" }, one.replica),
    h("td", {}, count(one.running)), h("td", {}, count(one.waiting)), h("td", {}, percent(one.kvUse)),
    h("td", {}, rate(one.tokensPerSecond)),
  ));
  tile.querySelector("tbody").replaceChildren(...rows);
}
