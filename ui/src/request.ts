// The latest requests, and one of them as a timeline: what it waited for, what was decided for it.

import { get } from "./api.js";
import { facts } from "./adapter.js";
import { partsBar, partsTable } from "./chart.js";
import { adapterLink, failure, h, set } from "./dom.js";
import { count, time } from "./format.js";
import { card } from "./overview.js";
import { repeat, type Page } from "./page.js";
import { PARTS, type Part, type Sequence, type SequenceSummary } from "./types.js";
import { waitsFor } from "./waits.js";

const EVERY_MS = 2000, MOST = 50;

export function request(id: string): Page {
  const body = h("div", { class: "stack" });
  const field = h("input", { id: "request-id", name: "id", value: id, autocomplete: "off", spellcheck: "false", size: "40" });
  const form = h("form", { class: "tools", submit: (event) => { event.preventDefault(); location.hash = `#/requests/${encodeURIComponent(field.value.trim())}`; } },
    h("label", { for: "request-id" }, "X-Request-Id or id of an answer "), field, h("button", {}, "Show"));

  async function list(): Promise<void> {
    try {
      const found = await get<{ data: SequenceSummary[] }>(`v1/requests?limit=${MOST}`);
      set(body, latest(found.data));
    } catch (error) {
      set(body, failure(error));
    }
  }

  async function show(): Promise<void> {
    try {
      const found = await get<{ sequences: Sequence[] }>(`v1/requests/${encodeURIComponent(id)}`);
      set(body, ...found.sequences.map(sequence));
    } catch (error) {
      set(body, failure(error));
    }
  }

  const stop = id ? undefined : repeat(EVERY_MS, list), title = id ? "Request" : "Requests";
  if (id) void show();
  return { title, element: h("section", {}, h("h1", {}, title), form, body), close: () => stop?.() };
}

/** Tell what the time to the first token went to, the part between the last wait and the token being prefill. */
function partsOf(each: SequenceSummary): Record<Part, number> {
  const queue = each.queue_s ?? 0, ttft = each.ttft_s ?? queue + each.adapter_wait_s + each.kv_wait_s;
  return { queue, adapter: each.adapter_wait_s, kv: each.kv_wait_s, prefill: Math.max(0, ttft - queue - each.adapter_wait_s - each.kv_wait_s) };
}

function latest(found: SequenceSummary[]): HTMLElement {
  if (!found.length) return h("p", { class: "dim" }, "No request has come since the server started.");
  const scale = Math.max(...found.map((each) => each.ttft_s ?? 0));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Latest requests" },
    h("table", {}, h("caption", { class: "hidden" }, "The latest requests, the newest first"),
      h("thead", {}, h("tr", {}, ...["Request", "Adapter", "Arrived", "TTFT and its parts", "Reason", "Tokens", "End"].map((name, at) =>
        h("th", { scope: "col", class: at === 2 || at === 5 ? null : "start" }, name)))),
      h("tbody", {}, ...found.map((each) => h("tr", {},
        h("td", { class: "start" }, h("a", { href: `#/requests/${encodeURIComponent(each.id)}` }, h("code", {}, each.id.slice(0, 12)))),
        h("td", { class: "start" }, each.adapter ? adapterLink(each.adapter) : h("small", {}, "base model")),
        h("td", {}, new Date(each.arrival_unix_s * 1000).toLocaleTimeString()),
        h("td", { class: "start" }, h("span", { class: "with-bar" }, partsBar(partsOf(each), scale), h("span", {}, time(each.ttft_s)))),
        h("td", { class: "start" }, reason(each)),
        h("td", {}, `${count(each.input_tokens)} + ${count(each.output_tokens ?? 0)}`),
        h("td", { class: "start" }, each.error ? h("span", { class: "bad", title: each.error }, "failed") : each.finish_reason ?? each.status))))));
}

const REASONS: Record<Part, string> = { queue: "queue", adapter: "transfer of its adapter", kv: "transfer of its KV", prefill: "prefill" };

/** Name what took most of the time to the first token. */
function reason(each: SequenceSummary): string {
  const parts = partsOf(each), largest = PARTS.reduce((most, part) => parts[part] > parts[most] ? part : most);
  if (!parts[largest]) return each.queue_s === null && each.status === "running" ? REASONS.queue : "–";
  return largest === "queue" && each.waited_for ? `queue, for ${waitsFor(each.waited_for)}` : REASONS[largest];
}

function sequence(each: Sequence): HTMLElement {
  const parts = partsOf(each);
  return card(h("h2", {}, h("code", {}, each.id)), timeline(each, parts),
    h("div", { class: "columns" },
      h("div", {}, h("h3", {}, "Time to the first token"), partsTable(parts)),
      facts([
        ["Adapter", each.adapter ? adapterLink(each.adapter) : "none: the base model"],
        ["Arrived", new Date(each.arrival_unix_s * 1000).toLocaleString()],
        ["State", each.error ? h("span", { class: "bad" }, each.error) : each.finish_reason ?? each.status],
        ["Tokens", `${count(each.input_tokens)} (${count(each.cached_tokens)} cached) + ${count(each.output_tokens ?? 0)}`],
        ["Waited in the queue for", each.waited_for || "its turn"],
        ["TTFT", time(each.ttft_s)],
        ["All", time(each.e2e_s)],
        ["Preempted", `${each.preemptions} times`],
      ])),
    h("h3", {}, "Decisions"),
    each.decisions.length
      ? h("ol", { class: "decisions" }, ...each.decisions.map((made) => h("li", {}, h("strong", {}, made.mechanism.replaceAll("_", " ")),
          ` after ${time(made.after_s)}, ${made.saved_s < 0 ? `cost ${time(-made.saved_s)}` : `saved ${time(made.saved_s)}`}: ${made.why}`)))
      : h("p", { class: "dim" }, "None."));
}

function timeline(each: Sequence, parts: Record<"queue" | "adapter" | "kv" | "prefill", number>): HTMLElement {
  const whole = each.e2e_s ?? Object.values(parts).reduce((sum, value) => sum + value, 0);
  const decode = Math.max(0, whole - (each.ttft_s ?? whole));
  const pieces: [string, string, number][] = [
    ["queue", "queue", parts.queue], ["adapter", "adapter", parts.adapter], ["kv", "KV", parts.kv],
    ["prefill", "prefill", parts.prefill], ["decode", "decode", decode],
  ];
  const bar = h("div", { class: "bar tall", role: "img", "aria-label": `Timeline: ${pieces.map(([, name, s]) => `${name} ${time(s)}`).join(", ")}` });
  for (const [part, name, seconds] of pieces) {
    const piece = h("i", { class: `part-${part}`, title: `${name} ${time(seconds)}` });
    piece.style.width = `${whole > 0 ? (100 * seconds) / whole : 0}%`;
    bar.append(piece);
  }
  const marks = each.decisions.map((made) => {
    const mark = h("i", { class: "mark", title: `${made.mechanism}: ${made.why}` });
    mark.style.left = `${whole > 0 ? Math.min(100, (100 * made.after_s) / whole) : 0}%`;
    return mark;
  });
  return h("figure", { class: "timeline" }, bar, h("div", { class: "marks", "aria-hidden": "true" }, ...marks),
    h("figcaption", { class: "span dim" }, h("span", {}, "arrival"), h("span", {}, pieces.filter(([, , s]) => s > 0).map(([, name, s]) => `${name} ${time(s)}`).join(" · ")), h("span", {}, time(whole))));
}
