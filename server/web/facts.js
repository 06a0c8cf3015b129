// What is served, and with what, in words.

import { count, duration, percent } from "./format.js";
import { h } from "./dom.js";

/** Shows the answer of /server_info in a list of terms. */
export function showFacts(list, info) {
  const { engine = {} } = info;
  const tokens = info.kv_cache_blocks * info.kv_cache_block_size;
  const cached = engine.enable_prefix_caching === "True" ? ", prefixes are kept" : "";
  const facts = {
    Model: info.model,
    Architecture: engine.architecture,
    Weights: [engine.weights || engine.quantization || engine.dtype, size(engine.weight_bytes)].filter(Boolean).join(", "),
    Device: engine.device,
    Kernels: engine.isa,
    Stages: engine.stages,
    Replica: info.replica,
    Context: `${count(info.max_model_len)} tokens`,
    "KV cache": [`${count(tokens)} tokens in ${engine.kv_cache_dtype}`, size(engine.kv_cache_bytes)].filter(Boolean)
      .join(", ") + cached,
    "Tool calls": info.tool_call_parser ?? "not read",
    Reasoning: info.reasoning_parser ?? "not read",
    Version: info.version,
  };
  const known = Object.entries(facts).filter(([, value]) => value);
  list.replaceChildren(...known.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

/** Shows what the stages of a pipeline do, if there is one, in a tile. A stage that others wait for computes all the time. */
export function showStages(tile, stages) {
  tile.hidden = stages.length === 0;
  const rows = stages.map(({ stage, computing, step, hop }) => h("tr", {},
    h("th", { scope: "row" }, `Stage ${stage}`),
    h("td", {}, percent(computing)), h("td", {}, duration(step)), h("td", {}, duration(hop)),
  ));
  tile.querySelector("tbody").replaceChildren(...rows);
}

/** Shows the names of adapters with requests, where any are served, in a tile. */
export function showAdapters(tile, adapters) {
  tile.hidden = adapters === null;
  if (tile.hidden) return;
  const waiting = adapters.waiting.length ? `; waiting: ${adapters.waiting.join(", ")}` : "";
  tile.querySelector("p").textContent = (adapters.running.join(", ") || "none") + waiting;
}

function size(bytes) {
  const mib = Number(bytes) / 2 ** 20;
  if (!(mib > 0)) return "";
  return mib < 1024 ? `${mib.toPrecision(3)} MiB` : `${(mib / 1024).toPrecision(3)} GiB`;
}
