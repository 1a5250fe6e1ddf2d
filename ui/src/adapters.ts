// All adapters in one table, ordered by the server, since it may have thousands.

import { get } from "./api.js";
import { partsBar } from "./chart.js";
import { adapterLink, failure, h, set, setText } from "./dom.js";
import { bytes, count, percent, rate, time } from "./format.js";
import { FOR_OPERATORS } from "./overview.js";
import type { Page } from "./page.js";
import { PARTS, type Adapter, type Stats } from "./types.js";

interface Column { sort: string; name: string; cell: (each: Adapter, scale: number) => string | Node; start?: boolean }

const COLUMNS: Column[] = [
  { sort: "name", name: "Adapter", start: true, cell: (each) => each.is_base ? h("span", {}, each.name, " ", h("small", {}, "base model"))
      : adapterLink(each.name) },
  { sort: "slowness", name: "Slowness", cell: (each) => each.slowness_s ? time(each.slowness_s) : "–" },
  { sort: "waits", name: "TTFT and its parts", start: true, cell: (each, scale) => each.parts_s
      ? h("span", { class: "with-bar" }, partsBar(each.parts_s, scale), h("span", {}, time(each.ttft_s?.mean))) : "–" },
  { sort: "traffic", name: "Requests", cell: (each) => `${count(each.requests)}${each.requests_per_s ? `, ${rate(each.requests_per_s)}/s` : ""}` },
  { sort: "residency", name: "On device", cell: (each) => each.device_bytes ? bytes(each.device_bytes) : "–" },
  { sort: "tier", name: "Tier", cell: (each) => each.tier + (each.pinned ? ", pinned" : "") },
  { sort: "hits", name: "Hits", cell: (each) => each.hits + each.misses ? percent(each.hits / (each.hits + each.misses)) : "–" },
  { sort: "errors", name: "Errors", cell: (each) => errors(each) },
  { sort: "saved", name: "Saved", cell: (each) => saved(each) },
];

function errors(each: Adapter): string | Node {
  if (each.load_error) return h("span", { class: "bad" }, "load failed");
  return each.requests_failed ? h("span", { class: "bad" }, count(each.requests_failed)) : "0";
}

function saved(each: Adapter): string {
  const seconds = Object.values(each.saved_s).reduce((sum, value) => sum + value, 0);
  return seconds ? `${seconds < 0 ? "−" : ""}${time(Math.abs(seconds))}` : "–";
}

let sort = "slowness", ascending = false, match = "";

export function adapters(changed: () => void): Page {
  const shown = h("p", { class: "dim" }), rows = h("tbody"), known = new Map<string, HTMLTableRowElement>();
  const heads = COLUMNS.map((column) => h("th", { scope: "col", class: column.start ? "start" : null },
    h("button", { type: "button", click: () => order(column) }, column.name)));
  const filter = h("input", { type: "search", id: "filter", placeholder: "part of a name", autocomplete: "off",
    input: () => { match = filter.value.trim(); changed(); } });
  filter.value = match;

  function order(column: Column): void {
    if (sort === column.sort) ascending = !ascending;
    else { sort = column.sort; ascending = column.sort === "name"; }
    mark();
    changed();
  }

  function mark(): void {
    COLUMNS.forEach((column, at) => {
      if (column.sort === sort) heads[at]?.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      else heads[at]?.removeAttribute("aria-sort");
    });
  }

  mark();
  const body = h("div", {},
      h("p", { class: "tools" }, h("label", { for: "filter" }, "Filter "), filter, shown),
      h("p", { class: "narrow dim" }, "Slide the table to the left for more columns: parts of TTFT, requests, memory, hits and errors."),
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of adapters" },
        h("table", { class: "adapters" }, h("caption", { class: "hidden" }, "Adapters; press a column's name to order by it"),
          h("thead", {}, h("tr", {}, ...heads)), rows)));
  return {
    title: "Adapters",
    element: h("section", {}, h("h1", {}, "Adapters"), body),
    refused: () => void names(body),
    query: () => ({ adapters: "200", sort, match, ascending: String(ascending) }),
    update(stats: Stats) {
      setText(shown, stats.adapters.length < stats.adapters_matching
        ? `${stats.adapters.length} of ${count(stats.adapters_matching)} shown` : `${count(stats.adapters_matching)} shown`);
      const scale = Math.max(...stats.adapters.map((each) => each.parts_s ? PARTS.reduce((sum, part) => sum + (each.parts_s?.[part] ?? 0), 0) : 0));
      const wanted = stats.adapters.map((each) => row(each, scale));
      // Only what moves is moved, so that focus and selection stay where they are.
      wanted.forEach((each, at) => { if (rows.children[at] !== each) rows.insertBefore(each, rows.children[at] ?? null); });
      while (rows.children.length > wanted.length) rows.lastElementChild?.remove();
    },
  };

  function row(each: Adapter, scale: number): HTMLTableRowElement {
    let found = known.get(each.name);
    if (!found) {
      found = h("tr", {}, ...COLUMNS.map((column, at) => at
        ? h("td", { class: column.start ? "start" : null }) : h("th", { scope: "row", class: "start" }, column.cell(each, scale))));
      known.set(each.name, found);
    }
    COLUMNS.forEach((column, at) => {
      if (at === 0) return;
      const cell = found.children[at], value = column.cell(each, scale);
      if (!cell) return;
      if (typeof value === "string") setText(cell, value);
      else set(cell, value);
    });
    found.classList.toggle("broken", each.load_error !== null);
    return found;
  }
}

/** List what a tenant's key may see; it may not read their figures. */
async function names(body: HTMLElement): Promise<void> {
  const said = h("p", {}, FOR_OPERATORS);
  set(body, said);
  try {
    const found = await get<{ data: { name: string }[]; total: number }>("v1/adapters?limit=1000");
    set(body, said, h("p", { class: "dim" }, `${count(found.data.length)} of ${count(found.total)} that this key may see:`),
      h("ul", {}, ...found.data.map((each) => h("li", {}, adapterLink(each.name)))));
  } catch (error) {
    set(body, said, failure(error));
  }
}
