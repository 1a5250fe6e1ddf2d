// Numbers as people read them.

/** Seconds with a unit: 850 µs, 12.3 ms, 4.56 s, 3 min. */
export function time(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds === 0) return "0 ms";
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${digits(seconds * 1e3)} ms`;
  if (seconds < 120) return `${digits(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

/** Bytes with a binary unit. */
export function bytes(count: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (count >= 1024 && at < units.length - 1) { count /= 1024; at += 1; }
  return `${at ? digits(count) : count} ${units[at]}`;
}

/** A count, with a thin space between thousands. */
export function count(value: number): string {
  return Math.round(value).toLocaleString("en").replaceAll(",", "\u2009");
}

/** A rate, with as many digits as it has meaning. */
export function rate(value: number): string {
  return value >= 100 ? count(value) : digits(value);
}

export function percent(share: number): string {
  return `${share > 0 && share < 0.01 ? "<1" : Math.round(share * 100)} %`;
}

/** Three digits at most, and no zeros at the end. */
function digits(value: number): string {
  return String(Number(value.toFixed(value >= 100 ? 0 : value >= 10 ? 1 : 2)));
}
