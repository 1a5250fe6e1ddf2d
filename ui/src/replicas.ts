// Replicas, the links between their tiers, and which adapters are served where.

import { get } from "./api.js";
import { adapterLink, failure, h, set } from "./dom.js";
import { bytes, count, percent, time } from "./format.js";
import { card } from "./overview.js";
import { repeat, type Page } from "./page.js";
import type { Cluster, Replica } from "./types.js";

const MOST_RESIDENT = 40;

export function replicas(): Page {
  const body = h("div", { class: "stack" }, h("p", { class: "dim" }, "Loading …"));
  const stop = repeat(2000, async () => {
    try {
      const found = await get<Cluster>("v1/cluster");
      set(body, summary(found), ...found.replicas.map(replica), placement(found));
    } catch (error) {
      set(body, failure(error));
    }
  });
  return { title: "Replicas", element: h("section", {}, h("h1", {}, "Replicas"), body), close: stop };
}

function summary(found: Cluster): HTMLElement {
  const said = [`${found.replicas.filter((each) => each.is_open).length} of ${found.replicas.length} open`];
  if (found.unrouted) said.push(`${count(found.unrouted)} requests wait for a replica`);
  if (found.wanted !== null) said.push(`the autoscaler wants ${found.wanted}`);
  if (found.moves) said.push(`${count(found.moves)} requests were moved`);
  return h("p", {}, said.join("; "), ".");
}

function replica(each: Replica): HTMLElement {
  const state = each.is_open ? "open" : each.alive ? "draining" : `down${each.trouble ? `: ${each.trouble}` : ""}`;
  const used = h("i", { class: "part-prefill" });
  used.style.width = `${100 * (each.memory_used ?? 0)}%`;
  return card(
    h("h2", {}, `Replica ${each.id}`, " ", h("small", { class: each.is_open ? "good" : "bad" }, state)),
    h("p", {}, `${each.address}${each.pid === null ? "" : `, process ${each.pid}`}${each.restarts ? `, restarted ${each.restarts} ×` : ""}. ` +
      `${count(each.running)} running, ${count(each.waiting)} waiting. ${count(each.held)} adapters held (${bytes(each.held_bytes)}).`),
    each.memory_used !== null && h("p", { class: "with-bar wide" }, h("span", { class: "bar", role: "img", "aria-label": `memory ${percent(each.memory_used)} used` }, used),
      h("span", {}, `${percent(each.memory_used)} of device memory`)),
    Object.keys(each.links).length > 0 && h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ...["link", "transfers", "bytes", "busy", "failed"].map((name, at) => h("th", { scope: "col", class: at ? null : "start" }, name)))),
      h("tbody", {}, ...Object.entries(each.links).sort().map(([route, use]) => h("tr", {}, h("th", { scope: "row", class: "start" }, route.replace("-", " → ")),
        h("td", {}, count(use.transfers)), h("td", {}, bytes(use.bytes)), h("td", {}, time(use.busy_s)), h("td", { class: use.failed ? "bad" : null }, count(use.failed))))))),
    h("h3", {}, each.memory_used === null ? `${count(each.resident.length)} adapters loaded` : `${count(each.resident.length)} adapters on the device`),
    h("p", { class: "names" }, ...each.resident.slice(0, MOST_RESIDENT).map(adapterLink),
      each.resident.length > MOST_RESIDENT && `and ${count(each.resident.length - MOST_RESIDENT)} more`));
}

function placement(found: Cluster): HTMLElement {
  const ids = found.replicas.map((each) => each.id), names = Object.keys(found.shares).sort();
  if (!names.length) return h("p", { class: "dim" }, "With one replica there is nothing to place.");
  return card(h("h2", {}, `Placement ${found.epoch}`),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Placement" }, h("table", {},
      h("thead", {}, h("tr", {}, h("th", { scope: "col", class: "start" }, "adapter"), ...ids.map((id) => h("th", { scope: "col" }, id)))),
      h("tbody", {}, ...names.slice(0, 500).map((name) => h("tr", {}, h("th", { scope: "row", class: "start" }, name),
        ...ids.map((id) => h("td", {}, found.shares[name]?.[id] ? percent(found.shares[name][id]) : "")))))))); 
}
