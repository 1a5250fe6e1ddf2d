// One adapter: why it is slow, its versions and places, its latest requests and errors, and what can be done.

import { ApiError, adapterPath, get, send } from "./api.js";
import { partsBar, partsTable } from "./chart.js";
import { confirmed, failure, h, say, set } from "./dom.js";
import { bytes, count, percent, time } from "./format.js";
import { card as boxed } from "./overview.js";
import { repeat, type Page } from "./page.js";
import type { Card, Ended } from "./types.js";
import { waitsFor } from "./waits.js";

const EVERY_MS = 2000;

export function adapter(name: string): Page {
  const body = h("div", { class: "stack" }, h("p", { class: "dim" }, "Loading …"));
  const pin = h("button", { type: "button", click: () => void change({ pinned: pin.getAttribute("aria-pressed") !== "true" }, "Pinned") }, "Pin");
  const load = h("button", { type: "button", click: () => void change({ warm: true }, "Loaded") }, "Load onto the device");
  const remove = h("button", { type: "button", class: "danger", click: () => void drop() }, "Remove");
  let stop = (): void => undefined, gone = false, card: Card | null = null, operates = true;

  /** Show what the key may do: the operator everything, others remove and load what is theirs. */
  function offer(): void {
    const own = card?.stats !== undefined && (operates || card.owner !== undefined);
    load.hidden = !own && !(card?.loaded === false && operates);
    pin.hidden = load.hidden || !operates;
    remove.hidden = !own;
  }

  async function refresh(): Promise<void> {
    if (gone) return;
    try {
      const found = card = await get<Card>(adapterPath(name));
      pin.setAttribute("aria-pressed", String(found.pinned));
      pin.textContent = found.pinned ? "Unpin" : "Pin";
      set(body, ...content(found));
    } catch (error) {
      if (error instanceof ApiError && error.status === 404) {
        card = null;
        set(body, h("p", {}, error.message));
      } else set(body, failure(error));
    }
    offer();
  }

  async function change(what: Record<string, boolean>, done: string): Promise<void> {
    try {
      await send("PATCH", adapterPath(name), what);
      say(`${what.pinned === false ? "Unpinned" : done}: ${name}`);
    } catch (error) { say(message(error)); }
    await refresh();
  }

  async function drop(): Promise<void> {
    if (!await confirmed(`Remove ${name}? New requests for it are refused; running ones end first.`, "Remove")) return;
    try {
      const answer = await send<{ freed_bytes: number | null }>("DELETE", adapterPath(name));
      gone = true;
      say(`Removed ${name}${answer.freed_bytes === null ? "" : `: ${bytes(answer.freed_bytes)} freed`}`);
      location.hash = "#/adapters";
    } catch (error) { say(message(error)); }
  }

  offer();
  stop = repeat(EVERY_MS, refresh);
  return {
    title: name,
    element: h("section", {}, h("p", { class: "crumbs" }, h("a", { href: "#/adapters" }, "Adapters")), h("h1", {}, name),
      h("p", { class: "actions" }, load, pin, h("a", { class: "button", href: `#/playground/${encodeURIComponent(name)}` }, "Try it"), remove), body),
    refused() { operates = false; offer(); },
    close: () => stop(),
  };
}

function message(error: unknown): string {
  return error instanceof ApiError ? error.message : String(error);
}

function content(found: Card): HTMLElement[] {
  const stats = found.stats;
  if (!stats) return without(found);
  const asked = stats.hits + stats.misses;
  const saved = Object.entries(stats.saved_s).filter(([, seconds]) => seconds);
  return [
    h("p", { class: stats.load_error ? "why bad" : "why", id: "why" }, stats.why || "No request in the last five minutes."),
    h("div", { class: "columns" },
      boxed(h("h2", {}, "Time to the first token"),
        stats.ttft_s ? h("p", {}, "Median ", h("strong", {}, time(stats.ttft_s.p50)), `, P90 ${time(stats.ttft_s.p90)}, P99 ${time(stats.ttft_s.p99)} of ${stats.ttft_s.count} requests`) : undefined,
        stats.parts_s ? partsTable(stats.parts_s) : h("p", { class: "dim" }, "Nothing measured in the last five minutes."),
        stats.requests_unanswered ? h("p", { class: "bad" }, `${count(stats.requests_unanswered)} have no token yet; the oldest waits for ${time(stats.oldest_unanswered_s)}.`) : undefined),
      boxed(h("h2", {}, "Version"), facts([
        ...version(found),
        ["Other names", found.also_named?.join(", ") || "none"],
        ["Loads", stats.loads ? `${count(stats.loads)}, the latest took ${time(stats.latest_load_s)}` : "none"],
      ]))),
    h("div", { class: "columns" },
      boxed(h("h2", {}, "Traffic"), facts([
        ["Requests", `${count(stats.requests)}: ${count(stats.requests_failed)} failed, ${count(stats.requests_aborted)} aborted, ${count(stats.requests_refused)} refused`],
        ["Unfinished", count(stats.requests_running)],
        ["Tokens", `${count(stats.prompt_tokens)} of prompts (${stats.prompt_tokens ? percent(stats.cached_tokens / stats.prompt_tokens) : "0 %"} cached), ${count(stats.generation_tokens)} generated`],
        ["Hits", asked ? `${percent(stats.hits / asked)} found it on the device` : "–"],
        ["ITL", stats.itl_s ? `median ${time(stats.itl_s.p50)}, P99 ${time(stats.itl_s.p99)}` : "–"],
        ["In the queue", Object.entries(stats.queue_s).filter(([, s]) => s > 0).map(([cause, seconds]) => `${time(seconds)} for ${waitsFor(cause)}`).join("; ") || "–"],
        ["Seconds saved", saved.map(([mechanism, seconds]) => `${mechanism.replaceAll("_", " ")} ${seconds.toFixed(2)} s`).join(", ") || "none"],
      ])),
      boxed(h("h2", {}, "Latest errors"), stats.errors.length
        ? h("ul", { class: "errors" }, ...stats.errors.map((each) => h("li", {},
            h("time", { datetime: new Date(each.unix_s * 1000).toISOString() }, new Date(each.unix_s * 1000).toLocaleTimeString()), " ",
            each.request_id ? h("a", { href: `#/requests/${encodeURIComponent(each.request_id)}` }, "request") : "load", ": ", each.message)))
        : h("p", { class: "dim" }, "None since the server started."))),
    boxed(h("h2", {}, "Latest requests"), requests(stats.recent)),
  ];
}

/** An adapter whose figures the key may not read, or that has none yet. */
function without(found: Card): HTMLElement[] {
  if (!found.loaded) return [h("p", { class: "why" }, "It is in the adapter folder, and not loaded yet: the first request that names it loads it.")];
  return [h("p", { class: "dim" }, "Its figures need an operator's key, or the key that it was loaded with."),
    boxed(h("h2", {}, "Version"), facts(version(found)))];
}

function version(found: Card): [string, string | Node][] {
  const replicas = found.replicas ?? [];
  const where = found.level === "gpu" ? `device${replicas.length > 1 ? `s of ${replicas.join(", ")}` : ""}, ${bytes(found.device_bytes)}`
    : found.level === "cpu" ? "host memory" : "files only";
  return [
    ["Digest", h("code", {}, found.digest)],
    ["Since", new Date(found.created * 1000).toLocaleString()],
    ["Source", found.source],
    ["Rank", String(found.rank)],
    ["Weights", bytes(found.weight_bytes)],
    ["Now in", where],
  ];
}

export function facts(pairs: [string, string | Node][]): HTMLElement {
  return h("dl", { class: "facts" }, ...pairs.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

function requests(recent: Ended[]): HTMLElement {
  if (!recent.length) return h("p", { class: "dim" }, "None in the last five minutes.");
  const scale = Math.max(...recent.map((each) => each.ttft_s ?? 0));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Latest requests" },
    h("table", {}, h("thead", {}, h("tr", {}, ...["request", "ended", "TTFT and its parts", "tokens", "end", "adapter"].map((name, at) =>
      h("th", { scope: "col", class: at === 0 || at === 2 ? "start" : null }, name)))),
      h("tbody", {}, ...recent.slice(0, 20).map((each) => h("tr", {},
        h("td", { class: "start" }, h("a", { href: `#/requests/${encodeURIComponent(each.request_id)}` }, h("code", {}, each.request_id.slice(0, 12)))),
        h("td", {}, `${time(Math.round(each.ended_ago_s))} ago`),
        h("td", { class: "start" }, h("span", { class: "with-bar" }, partsBar(each.parts_s, scale), h("span", {}, time(each.ttft_s)))),
        h("td", {}, `${count(each.input_tokens)} + ${count(each.output_tokens)}`),
        h("td", {}, each.finish_reason),
        h("td", {}, each.hit === null ? "–" : each.hit ? "there" : "loaded"))))));
}
