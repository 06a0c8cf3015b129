// Numbers for people. Unknown values are a dash.

/** Seconds in words: "9 ms", "1.42 s". */
export function duration(seconds) {
  if (seconds === null) return "–";
  if (seconds < 0.01) return `${(seconds * 1000).toFixed(1)} ms`;
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}

/** A number of tokens a second: "9.4", "61". */
export function rate(value) {
  if (value === null) return "–";
  return value > 0 && value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}

/** A whole number. */
export function count(value) {
  return value === null ? "–" : value.toLocaleString("en");
}

/** A number of bytes: "12.3 MiB". Nothing for what is not known. */
export function size(bytes) {
  const units = ["MiB", "GiB", "TiB"];
  let value = Number(bytes) / 2 ** 20;
  for (; value >= 999.5 && units.length > 1; value /= 1024) units.shift();
  return value > 0 ? `${value.toPrecision(3)} ${units[0]}` : "";
}

/** A share between 0 and 1, in percent. */
export function percent(share) {
  if (share === null) return "–";
  return share > 0 && share < 0.1 ? `${(share * 100).toFixed(1)} %` : `${Math.round(share * 100)} %`;
}
