// The first page: load, latencies, what waits for what, memory over time, the slowest adapters.

import { line, partsTable, strip } from "./chart.js";
import { adapterLink, h, set } from "./dom.js";
import { count, percent, rate, time } from "./format.js";
import type { Page } from "./page.js";
import type { Percentiles, Sample, Stats } from "./types.js";
import { waitsFor } from "./waits.js";

const MOST = 300;
export const FOR_OPERATORS = "These figures are of all tenants, and need an operator's key: press “Key” to give one.";

export function overview(): Page {
  const body = h("div", { class: "stack" }, h("p", { class: "dim" }, "Waiting for the first figures …"));
  let samples: Sample[] = [];
  return {
    title: "Overview",
    element: h("section", {}, h("h1", {}, "Overview"), body),
    query: () => ({ adapters: "5", sort: "slowness", history: "true" }),
    refused() { set(body, h("p", {}, FOR_OPERATORS)); },
    update(stats: Stats) {
      if (stats.history) samples = stats.history;
      samples = [...samples.slice(-MOST), sample(stats)];
      const inside = !stats.is_router;
      set(body,
        h("dl", { class: "tiles" },
          tile("Tokens/s", rate(stats.per_s.generation_tokens), `${rate(stats.per_s.prompt_tokens)} of prompts`),
          tile("Requests/s", rate(stats.per_s.requests), `${count(stats.requests.finished)} finished`),
          tile("Running", count(stats.requests.running), `${count(stats.requests.waiting)} wait`),
          latency("TTFT", stats.ttft_s),
          inside && latency("ITL", stats.itl_s),
          inside && tile("Adapter hits", share(stats.hits.adapter_hits, stats.hits.adapter_queries), `${share(stats.hits.kv_hit_tokens, stats.hits.kv_query_tokens)} of prompt tokens`),
          tile("Failed", count(stats.requests.failed), `${count(stats.requests.aborted)} aborted${inside ? `, ${count(stats.preemptions)} preempted` : ""}`)),
        h("div", { class: "columns" },
          card(line("Tokens generated per second", samples, (each) => each.generation_tokens_per_s, rate)),
          card(line("Requests waiting", samples, (each) => each.waiting, count))),
        inside && h("div", { class: "columns" },
          card(strip("Device memory", samples, "device")),
          (stats.memory.host.total > 0) && card(strip("Host memory", samples, "host"))),
        inside && h("div", { class: "columns" }, card(h("h2", {}, "Where the time to the first token goes"),
          stats.parts_s ? partsTable(stats.parts_s) : h("p", { class: "dim" }, "No request had its first token in the last five minutes.")),
          card(h("h2", {}, "What requests wait for"), waits(stats))),
        card(h("h2", {}, "Slowest adapters"), slowest(stats), h("p", {}, h("a", { href: "#/adapters" }, `All ${count(stats.adapters_total)} adapters`))));
    },
  };
}

function sample(stats: Stats): Sample {
  return {
    unix_s: stats.unix_s, generation_tokens_per_s: stats.per_s.generation_tokens, requests_per_s: stats.per_s.requests,
    running: stats.requests.running, waiting: stats.requests.waiting, memory: stats.memory,
  };
}

export function card(...children: (Node | false | undefined)[]): HTMLElement { return h("div", { class: "card" }, ...children); }

function tile(name: string, value: string, more: string): HTMLElement {
  return h("div", {}, h("dt", {}, name), h("dd", {}, h("strong", {}, value), h("span", { class: "dim" }, more)));
}

function latency(name: string, found: Percentiles | null): HTMLElement {
  return tile(`${name}, median`, time(found?.p50), found ? `P90 ${time(found.p90)}, P99 ${time(found.p99)}` : "none in five minutes");
}

function share(part: number | undefined, whole: number | undefined): string {
  return whole ? percent((part ?? 0) / whole) : "–";
}

function waits(stats: Stats): HTMLElement {
  const waiting = Object.entries(stats.requests.waiting_by).filter(([, requests]) => requests > 0);
  if (!waiting.length) return h("p", { class: "dim" }, "No request waits.");
  const most = Math.max(...waiting.map(([, requests]) => requests));
  return h("table", { class: "bars" }, h("caption", { class: "hidden" }, "Waiting requests by cause"), h("tbody", {},
    ...waiting.sort((a, b) => b[1] - a[1]).map(([cause, requests]) => {
      const bar = h("i", { "aria-hidden": "true" });
      bar.style.width = `${(100 * requests) / most}%`;
      return h("tr", {}, h("th", { scope: "row" }, waitsFor(cause)), h("td", {}, bar), h("td", {}, count(requests)));
    })));
}

function slowest(stats: Stats): HTMLElement {
  const slow = stats.adapters.filter((each) => each.slowness_s > 0 || each.load_error);
  if (!slow.length) return h("p", { class: "dim" }, "No adapter had requests in the last five minutes.");
  return h("ul", { class: "slow" }, ...slow.map((each) => h("li", {},
    each.is_base ? h("span", {}, each.name) : adapterLink(each.name),
    h("strong", {}, time(each.slowness_s)), h("span", { class: "dim" }, each.why))));
}
