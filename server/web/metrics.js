// Parses Prometheus text, and computes what happened between two scrapes.

const REPLICA = /^\{replica="([^"]*)"/;
const MODEL = /[{,]model_name="((?:[^"\\]|\\.)*)"/;

/**
 * The series of each model of each replica ("" where none is named): a map, by both names, of {replica, model, samples}.
 * `samples` is a map of names to the sum of their series.
 */
export function parseMetrics(text) {
  const parts = new Map();
  for (const line of text.split("\n")) {
    if (!line || line[0] === "#") continue;
    const labels = line.indexOf("{");
    const end = labels < 0 ? line.indexOf(" ") : line.lastIndexOf("}") + 1;
    const name = line.slice(0, labels < 0 ? end : labels);
    const described = labels < 0 ? "" : line.slice(labels, end);
    const replica = REPLICA.exec(described)?.[1] ?? "";
    const model = (MODEL.exec(described)?.[1] ?? "").replace(/\\(.)/g, (_, char) => (char === "n" ? "\n" : char));
    const value = Number(line.slice(end).trim().split(" ")[0]);
    if (!Number.isFinite(value)) continue;
    const key = JSON.stringify([replica, model]);
    if (!parts.has(key)) parts.set(key, { replica, model, samples: new Map() });
    const { samples } = parts.get(key);
    samples.set(name, (samples.get(name) ?? 0) + value);
  }
  return parts;
}

const STAGE = /pipeline_stage_(\w+)_total\{(?:replica="([^"]*)",)?.*?stage="(\d+)".*?\}\s+(\S+)/;

/** The counters of each pipeline stage by its number: a map of `steps`, `computing_seconds` and so on. */
export function parseStages(text) {
  const stages = new Map();
  for (const line of text.split("\n")) {
    const found = line[0] === "#" ? null : STAGE.exec(line);
    if (!found) continue;
    const [, name, replica, number, value] = found;
    const stage = replica ? `${number} of ${replica}` : number;
    if (!stages.has(stage)) stages.set(stage, new Map());
    stages.get(stage).set(name, Number(value));
  }
  return stages;
}

/** The names of adapters with `running` and with `waiting` requests in all replicas; null if none are served. */
export function parseAdapters(text) {
  const lines = text.split("\n").filter((line) => /^[^#]*lora_requests_info\{/.test(line));
  if (!lines.length) return null;
  const names = (label) => {
    const value = new RegExp(`${label}_lora_adapters="((?:[^"\\\\]|\\\\.)*)"`);
    const all = lines.map((line) => value.exec(line)?.[1] ?? "").filter(Boolean);
    return [...new Set(all.flatMap((some) => some.replace(/\\(.)/g, "$1").split(",")))];
  };
  return { running: names("running"), waiting: names("waiting") };
}

/** Tokens per second of an answer with this number of tokens, whose last came `seconds` after its first. */
export function speed(tokens, seconds) {
  return (tokens - 1) / seconds;
}

const ANCHOR = "num_requests_running";

/** Turns readings of the counters into rates. The metrics may have any prefix. */
export class Meter {
  #before = null;
  #stages = { at: 0, counts: new Map() }; // of the last reading

  /**
   * The values of a scrape: `running`, `waiting`, `kvUse` (0 to 1), and since the last reading `tokensPerSecond`,
   * `firstToken` and `betweenTokens` (mean seconds), `prefixHits` and `acceptanceRate` (0 to 1). `ever` has the last four
   * since the server's start. `adapters` come from `parseAdapters`. `stages` are those of a pipeline, with `step` and
   * `hop` in seconds, and `computing` as a share of the time since the last reading. Null is unknown. The speed covers
   * all answers: the tokens after their first ones, divided by the time in which any answer was between its first and
   * its last token. For a single answer it equals `speed`.
   *
   * If the text has series of several replicas, `replicas` has the first four values of each. The other values then cover
   * all replicas: sums, and means over all requests. `numReplicas` counts the replicas that run. `models` has the first
   * four values of each model, and its `memory` in bytes. All of them use `memoryUsed` of the `memoryBudget`.
   */
  read(text, now) {
    const parts = parseMetrics(text);
    const name = [...parts.values()].flatMap(({ samples }) => [...samples.keys()]).find((key) => key.endsWith(ANCHOR));
    const prefix = (name ?? ANCHOR).slice(0, -ANCHOR.length);
    const counts = [...parts].map(([key, { replica, model, samples }]) => ({
      replica, model, ...countsOf(samples, this.#before?.get(key)?.samples, prefix),
    }));
    this.#before = parts;
    const get = (key) => sum(counts.map((one) => one.get(key)));
    const since = (key) => sum(counts.map((one) => one.since(key)));
    const means = (value) => ({
      firstToken: ratio(value("time_to_first_token_seconds_sum"), value("time_to_first_token_seconds_count")),
      betweenTokens: ratio(value("inter_token_latency_seconds_sum"), value("inter_token_latency_seconds_count")),
      prefixHits: ratio(value("prefix_cache_hits_total"), value("prefix_cache_queries_total")),
      acceptanceRate: ratio(value("spec_decode_num_accepted_tokens_total"), value("spec_decode_num_draft_tokens_total")),
    });
    const by = (label) => [...Map.groupBy(counts, (one) => one[label])].filter(([value]) => value)
      .map(([value, some]) => ({ [label]: value, ...totals(some) }));
    return {
      ...totals(counts),
      ...means(since),
      ever: means(get),
      adapters: parseAdapters(text),
      stages: this.#readStages(text, now),
      numReplicas: get("replicas"),
      numSilent: get("replicas_silent"),
      replicas: by("replica"),
      models: by("model"),
      memoryUsed: get("memory_used_bytes"),
      memoryBudget: get("memory_budget_bytes"),
    };
  }

  #readStages(text, now) {
    const last = this.#stages;
    this.#stages = { at: now, counts: parseStages(text) };
    return [...this.#stages.counts].map(([stage, counts]) => {
      const before = last.counts.get(stage);
      const since = (name) => Math.max(counts.get(name) - (before?.get(name) ?? counts.get(name)), 0);
      return {
        stage,
        step: ratio(since("computing_seconds"), since("steps")),
        hop: ratio(since("hop_seconds"), since("hops")),
        computing: before ? ratio(since("computing_seconds"), (now - last.at) / 1000) : null,
      };
    });
  }

  /** Drops the last reading, because it is too long ago. */
  reset() {
    this.#before = null;
    this.#stages = { at: 0, counts: new Map() };
  }
}

/** A replica's counts: `get` for all time, and `since` the reading `before`. Null is unknown. */
function countsOf(samples, before, prefix) {
  const get = (key) => samples.get(prefix + key) ?? null;
  const since = (key) => {
    const value = get(key);
    const last = before?.get(prefix + key) ?? null;
    if (value === null || last === null) return null;
    return value < last ? value : value - last; // a restarted server counts from 0
  };
  return { get, since };
}

/** What parts of a server do together. */
function totals(counts) {
  const get = (key) => sum(counts.map((one) => one.get(key)));
  const used = counts.map((one) => one.get("kv_cache_usage_perc") ?? one.get("gpu_cache_usage_perc"));
  return {
    running: get(ANCHOR),
    waiting: get("num_requests_waiting"),
    kvUse: ratio(sum(used), used.filter((use) => use !== null).length),
    tokensPerSecond: sum(counts.map(({ since }) => (since("decode_seconds_total") === 0 ? 0 : ratio(
      since("inter_token_latency_seconds_count"), since("decode_seconds_total"),
    )))),
    memory: get("model_memory_bytes"),
  };
}

/** The sum of the known values; null if there are none. */
function sum(values) {
  return values.reduce((total, value) => (value === null ? total : (total ?? 0) + value), null);
}

function ratio(part, whole) {
  return part !== null && whole > 0 ? part / whole : null;
}
