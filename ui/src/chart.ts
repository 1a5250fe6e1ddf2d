// Charts as SVG. Each has a text beside it that says the newest values, so the picture itself is hidden from readers.

import { h, svg } from "./dom.js";
import { KINDS, PARTS, type Kind, type Part, type Sample, type Tier } from "./types.js";
import { bytes, percent, time } from "./format.js";

const WIDTH = 600;

/** Return a line over time with its newest value in words. */
export function line(title: string, samples: Sample[], value: (each: Sample) => number, show: (v: number) => string): HTMLElement {
  const height = 90, values = samples.map(value), most = Math.max(...values, 1e-9);
  const at = positions(samples);
  const points = values.map((each, i) => `${(at[i] ?? 0).toFixed(1)},${(height - 4 - (each / most) * (height - 10)).toFixed(1)}`);
  const last = values.at(-1) ?? 0;
  const picture = frame(height,
    svg("polyline", { class: "fill", points: `${at[0] ?? 0},${height - 2} ${points.join(" ")} ${WIDTH},${height - 2}` }),
    svg("polyline", { class: "stroke", points: points.join(" ") }));
  return h("figure", { class: "chart" },
    h("figcaption", {}, h("span", {}, title), h("strong", {}, show(last)), h("span", { class: "dim" }, `most ${show(most < 1e-8 ? 0 : most)}`)),
    picture, span(samples));
}

/** Return a strip of what a tier held over time. */
export function strip(title: string, samples: Sample[], tier: "device" | "host"): HTMLElement {
  const height = 110, at = positions(samples);
  const shown = KINDS.filter((kind) => kind !== "free");
  const below = samples.map(() => 0);
  const areas = shown.map((kind) => {
    const lower = samples.map((each, i) => point(at[i], below[i] ?? 0, each.memory[tier].total, height));
    const upper = samples.map((each, i) => {
      below[i] = (below[i] ?? 0) + each.memory[tier][kind];
      return point(at[i], below[i] ?? 0, each.memory[tier].total, height);
    });
    return svg("polygon", { class: `kind-${kind}`, points: [...lower, ...upper.reverse()].join(" ") });
  });
  const last = samples.at(-1)?.memory[tier];
  return h("figure", { class: "chart" },
    h("figcaption", {}, h("span", {}, title), last && h("strong", {}, bytes(last.total))),
    frame(height, ...areas), span(samples), last && legend(last));
}

function legend(tier: Tier): HTMLElement {
  const names: Record<Kind, string> = {
    kv_running: "KV in use", kv_cached: "KV cached", adapters: "adapters", inflight: "in transfer", free: "free",
  };
  return h("ul", { class: "legend" }, ...KINDS.map((kind) => h("li", { class: `key-${kind}` },
    h("i", { "aria-hidden": "true" }), `${names[kind]} ${bytes(tier[kind])}`)));
}

function point(x: number | undefined, value: number, total: number, height: number): string {
  return `${(x ?? 0).toFixed(1)},${(height - (total ? value / total : 0) * height).toFixed(1)}`;
}

function positions(samples: Sample[]): number[] {
  const first = samples[0]?.unix_s ?? 0, last = samples.at(-1)?.unix_s ?? 1;
  return samples.map((each) => last > first ? ((each.unix_s - first) / (last - first)) * WIDTH : WIDTH);
}

function frame(height: number, ...children: SVGElement[]): SVGElement {
  return svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" }, ...children);
}

function span(samples: Sample[]): HTMLElement {
  const seconds = (samples.at(-1)?.unix_s ?? 0) - (samples[0]?.unix_s ?? 0);
  return h("p", { class: "span dim", "aria-hidden": "true" }, h("span", {}, `${time(Math.round(seconds))} ago`), h("span", {}, "now"));
}

const NAMES: Record<Part, string> = { queue: "queue", adapter: "adapter", kv: "KV", prefill: "prefill" };

/** Return the parts of TTFT as one bar; `scale` is the time that fills it. */
export function partsBar(parts: Record<Part, number>, scale: number): HTMLElement {
  const bar = h("span", { class: "bar", role: "img", "aria-label": PARTS.map((part) => `${NAMES[part]} ${time(parts[part])}`).join(", ") });
  for (const part of PARTS) {
    const piece = h("i", { class: `part-${part}`, title: `${NAMES[part]} ${time(parts[part])}` });
    piece.style.width = `${scale > 0 ? Math.min(100, (100 * parts[part]) / scale) : 0}%`;
    bar.append(piece);
  }
  return bar;
}

/** Return the parts of TTFT as a bar with a table of its parts. */
export function partsTable(parts: Record<Part, number>): HTMLElement {
  const total = PARTS.reduce((sum, part) => sum + parts[part], 0);
  return h("div", { class: "parts" }, partsBar(parts, total),
    h("table", {}, h("caption", { class: "hidden" }, "Mean parts of the time to the first token"),
      h("thead", {}, h("tr", {}, ...["part", "mean", "share"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, ...PARTS.map((part) => h("tr", {},
        h("th", { scope: "row", class: `key-${part}` }, h("i", { "aria-hidden": "true" }), NAMES[part]),
        h("td", {}, time(parts[part])), h("td", {}, percent(total ? parts[part] / total : 0)))))));
}
