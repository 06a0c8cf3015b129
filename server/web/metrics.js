// Prometheus' text, and what happened between two readings of it.

/** A map of sample names to the sum of their series. */
export function parseMetrics(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    if (!line || line[0] === "#") continue;
    const labels = line.indexOf("{");
    const end = labels < 0 ? line.indexOf(" ") : line.lastIndexOf("}") + 1;
    const name = line.slice(0, labels < 0 ? end : labels);
    const value = Number(line.slice(end).trim().split(" ")[0]);
    if (Number.isFinite(value)) samples.set(name, (samples.get(name) ?? 0) + value);
  }
  return samples;
}

const STAGE = /pipeline_stage_(\w+)_total\{.*?stage="(\d+)".*?\}\s+(\S+)/;

/** What each stage of a pipeline has counted, by its number: a map of `steps`, `computing_seconds` and so on. */
export function parseStages(text) {
  const stages = new Map();
  for (const line of text.split("\n")) {
    const found = line[0] === "#" ? null : STAGE.exec(line);
    if (!found) continue;
    const [, name, stage, value] = found;
    if (!stages.has(stage)) stages.set(stage, new Map());
    stages.get(stage).set(name, Number(value));
  }
  return stages;
}

/** The names of adapters with `running` and with `waiting` requests; null where no adapters are served. */
export function parseAdapters(text) {
  const line = text.split("\n").find((line) => /^[^#]*lora_requests_info\{/.test(line));
  if (!line) return null;
  const names = (label) => {
    const [, value] = new RegExp(`${label}_lora_adapters="((?:[^"\\\\]|\\\\.)*)"`).exec(line) ?? [];
    return value ? value.replace(/\\(.)/g, "$1").split(",") : [];
  };
  return { running: names("running"), waiting: names("waiting") };
}

/** Tokens a second of an answer with so many, of which the last came `seconds` after the first. */
export function speed(tokens, seconds) {
  return (tokens - 1) / seconds;
}

const ANCHOR = "num_requests_running";

/** Turns readings of the counters into rates. The metrics' prefix is whatever it is. */
export class Meter {
  #before = null;
  #stages = { at: 0, counts: new Map() }; // of the last reading

  /**
   * What the text of a scrape tells: `running`, `waiting`, `kvUse` (0 to 1), and since the last reading
   * `tokensPerSecond`, `firstToken` and `betweenTokens` (mean seconds) and `prefixHits` (0 to 1); `ever` has the last
   * three since the server's start. `adapters` are as `parseAdapters` has them. `stages` are those of a pipeline, with
   * `step` and `hop` in seconds and the share `computing` of the time since the last reading. Null is unknown. The
   * speed is of all answers: the tokens behind their first ones, by the time in which any was between its first token
   * and its last. Of one answer it is what `speed` says of it.
   */
  read(text, now) {
    const samples = parseMetrics(text);
    const name = [...samples.keys()].find((key) => key.endsWith(ANCHOR)) ?? ANCHOR;
    const prefix = name.slice(0, -ANCHOR.length);
    const get = (key) => samples.get(prefix + key) ?? null;
    const before = this.#before;
    this.#before = { get };
    const since = (key) => {
      const value = get(key);
      const last = before?.get(key) ?? null;
      if (value === null || last === null) return null;
      return value < last ? value : value - last; // a server that was started again counts from 0
    };
    const ratio = (part, whole) => (part !== null && whole > 0 ? part / whole : null);
    const means = (value) => ({
      firstToken: ratio(value("time_to_first_token_seconds_sum"), value("time_to_first_token_seconds_count")),
      betweenTokens: ratio(value("inter_token_latency_seconds_sum"), value("inter_token_latency_seconds_count")),
      prefixHits: ratio(value("prefix_cache_hits_total"), value("prefix_cache_queries_total")),
    });
    return {
      running: get(ANCHOR),
      waiting: get("num_requests_waiting"),
      kvUse: get("kv_cache_usage_perc") ?? get("gpu_cache_usage_perc"),
      tokensPerSecond: since("decode_seconds_total") === 0 ? 0 : ratio(
        since("inter_token_latency_seconds_count"), since("decode_seconds_total"),
      ),
      ...means(since),
      ever: means(get),
      adapters: parseAdapters(text),
      stages: this.#readStages(text, now),
    };
  }

  #readStages(text, now) {
    const last = this.#stages;
    this.#stages = { at: now, counts: parseStages(text) };
    return [...this.#stages.counts].map(([stage, counts]) => {
      const before = last.counts.get(stage);
      const since = (name) => Math.max(counts.get(name) - (before?.get(name) ?? counts.get(name)), 0);
      const ratio = (part, whole) => (whole > 0 ? part / whole : null);
      return {
        stage,
        step: ratio(since("computing_seconds"), since("steps")),
        hop: ratio(since("hop_seconds"), since("hops")),
        computing: before ? ratio(since("computing_seconds"), (now - last.at) / 1000) : null,
      };
    });
  }

  /** Forgets the last reading, from which too much time has passed. */
  reset() {
    this.#before = null;
    this.#stages = { at: 0, counts: new Map() };
  }
}
