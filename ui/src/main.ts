// The console: chooses the page, follows the statistics, and asks for a key where one is needed.

import { adapter } from "./adapter.js";
import { adapters } from "./adapters.js";
import { ApiError, events, key, setKey } from "./api.js";
import { h, say, set, setText } from "./dom.js";
import { time } from "./format.js";
import { overview } from "./overview.js";
import type { Page } from "./page.js";
import { playground } from "./playground.js";
import { replicas } from "./replicas.js";
import { request } from "./request.js";
import type { Stats } from "./types.js";
import { learnWords } from "./waits.js";

const RETRY_MS = 2000;
const PAGES: [string, string][] = [
  ["overview", "Overview"], ["adapters", "Adapters"], ["requests", "Requests"], ["replicas", "Replicas"], ["playground", "Playground"],
];

const main = document.getElementById("main") as HTMLElement;
const state = document.getElementById("state") as HTMLElement;
const links = PAGES.map(([path, name]) => h("a", { href: `#/${path}`, class: path === "requests" ? "of-server" : null }, name));
document.getElementById("nav")?.append(...links, h("a", { href: "docs", class: "of-server" }, "HTTP API"));
document.getElementById("key-button")?.addEventListener("click", () => askForKey(""));

let page: Page | null = null;
let following: AbortController | null = null;

function show(): void {
  const [, path = "overview", ...rest] = location.hash.split("/");
  const name = decodeURIComponent(rest.join("/"));
  page?.close?.();
  page = path === "adapters" ? (name ? adapter(name) : adapters(follow)) : path === "requests" ? request(name)
    : path === "replicas" ? replicas() : path === "playground" ? playground(name) : overview();
  document.title = `${page.title} – Lorikeet`;
  links.forEach((link, at) => {
    if (PAGES[at]?.[0] === path) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  });
  set(main, page.element);
  window.scrollTo(0, 0);
  follow();
}

/** Follow the statistics as the page wants them; without a page that wants any, only for the state. */
function follow(): void {
  following?.abort();
  const aborter = following = new AbortController();
  void (async () => {
    while (!aborter.signal.aborted) {
      const query = page?.query?.() ?? { adapters: "0", interval_s: "5" };
      try {
        for await (const data of events(`v1/stats/stream?${new URLSearchParams(query)}`, { signal: aborter.signal })) {
          if (aborter.signal.aborted) return;
          const stats = JSON.parse(data) as Stats;
          setState(stats);
          if (page?.query) page.update?.(stats);
        }
      } catch (error) {
        if (aborter.signal.aborted) return;
        if (error instanceof ApiError && error.status < 500) {
          set(state, h("span", { class: "bad" }, error.status === 401 ? "needs a key" : error.status === 403 ? "no operator's key" : error.message));
          if (error.status === 403) page?.refused?.();
          return;
        }
        set(state, h("span", { class: "bad" }, "not reachable"));
      }
      await new Promise((done) => window.setTimeout(done, RETRY_MS));
    }
  })();
}

function setState(stats: Stats): void {
  learnWords(stats);
  document.body.classList.toggle("router", stats.is_router === true);
  const text = `${stats.model}: ${stats.status}`;
  if (state.textContent !== text) set(state, h("span", { class: stats.status === "ready" ? "good" : "bad" }, text));
  state.title = `Lorikeet ${stats.version}, up for ${time(stats.uptime_s)}`;
}

let asking = false;

function askForKey(why: string): void {
  if (asking) return;
  asking = true;
  const field = h("input", { id: "key", type: "password", autocomplete: "off", value: key() });
  const dialog = h("dialog", { "aria-labelledby": "key-title", close: () => { asking = false; dialog.remove(); } },
    h("form", { method: "dialog", submit: () => { setKey(field.value.trim()); say("The key is kept until this tab is closed."); show(); } },
      h("h2", { id: "key-title" }, "Key of this server"),
      why ? h("p", {}, why) : null,
      h("p", { class: "field" }, h("label", { for: "key" }, "Key (an admin key, if there are any)"), field),
      h("p", { class: "actions" }, h("button", { type: "button", click: () => dialog.close() }, "Cancel"), h("button", { class: "primary" }, "Use"))));
  document.body.append(dialog);
  dialog.showModal();
  field.focus();
}

document.addEventListener("needs-key", () => askForKey("This server wants a key. It is kept in this tab only, and sent to this server only."));
window.addEventListener("hashchange", () => { show(); main.focus({ preventScroll: true }); });
setText(state, "connecting");
show();
