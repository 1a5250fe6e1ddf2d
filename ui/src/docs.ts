// The routes, as openapi.json describes them.

import { get } from "./api.js";
import { failure, h, set } from "./dom.js";

interface Schema {
  $ref?: string; type?: string; title?: string; description?: string; properties?: Record<string, Schema>; required?: string[];
  items?: Schema; anyOf?: Schema[]; allOf?: Schema[]; enum?: unknown[]; const?: unknown; default?: unknown;
  additionalProperties?: Schema | boolean;
}
interface Operation {
  summary?: string; description?: string;
  parameters?: { name: string; in: string; required?: boolean; schema?: Schema }[];
  requestBody?: { content?: Record<string, { schema?: Schema }> };
}
interface Described { info: { version: string }; paths: Record<string, Record<string, Operation>>; components?: { schemas?: Record<string, Schema> } }

const main = document.getElementById("main") as HTMLElement;
let schemas: Record<string, Schema> = {};

function resolve(schema: Schema): Schema {
  return schema.$ref ? schemas[schema.$ref.split("/").at(-1) ?? ""] ?? {} : schema;
}

function typeOf(schema: Schema): string {
  if (schema.$ref) return schema.$ref.split("/").at(-1) ?? "object";
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  const parts = schema.anyOf ?? schema.allOf;
  if (parts) return [...new Set(parts.map(typeOf))].join(" | ");
  if (schema.type === "array") return `${typeOf(schema.items ?? {})}[]`;
  return schema.type ?? "any";
}

function fields(schema: Schema): HTMLElement {
  const found = resolve(schema), properties = Object.entries(found.properties ?? {});
  if (!properties.length) return h("p", {}, h("code", {}, typeOf(schema)));
  return h("div", { class: "scroll" }, h("table", { class: "fields" },
    h("thead", {}, h("tr", {}, ...["field", "type", ""].map((name) => h("th", { scope: "col", class: "start" }, name)))),
    h("tbody", {}, ...properties.map(([name, each]) => h("tr", {}, h("th", { scope: "row", class: "start" }, h("code", {}, name)),
      h("td", { class: "start" }, h("code", {}, typeOf(each))),
      h("td", { class: "start" }, found.required?.includes(name) ? "required" : each.default === undefined || each.default === null ? "" : `default ${JSON.stringify(each.default)}`))))));
}

function operation(method: string, path: string, each: Operation): HTMLElement {
  const body = Object.values(each.requestBody?.content ?? {})[0]?.schema;
  const example = `curl ${method === "get" ? "" : `-X ${method.toUpperCase()} `}${location.origin}${path}${body ? " -H 'Content-Type: application/json' -d '{…}'" : ""}`;
  return h("details", { class: "route" },
    h("summary", {}, h("b", { class: `method ${method}` }, method.toUpperCase()), " ", h("code", {}, path), " ", h("span", { class: "dim" }, (each.description ?? each.summary ?? "").split("\n")[0])),
    h("p", { class: "said-of" }, each.description ?? ""),
    each.parameters?.length ? h("div", {}, h("h3", {}, "Parameters"), h("ul", {}, ...each.parameters.map((one) => h("li", {}, h("code", {}, one.name),
      ` in ${one.in}: ${typeOf(one.schema ?? {})}${one.required ? ", required" : one.schema?.default === undefined ? "" : `, default ${JSON.stringify(one.schema.default)}`}`)))) : null,
    body ? h("div", {}, h("h3", {}, "Body"), fields(body)) : null,
    h("pre", {}, example));
}

function group(path: string): string {
  const parts = path.split("/").filter(Boolean);
  return parts[0] === "v1" ? `/v1/${parts[1] ?? ""}` : "other servers' routes, health and more";
}

async function show(): Promise<void> {
  set(main, h("h1", {}, "HTTP API"), h("p", { class: "dim" }, "Loading …"));
  try {
    const described = await get<Described>("openapi.json");
    schemas = described.components?.schemas ?? {};
    const filter = h("input", { type: "search", id: "filter", placeholder: "part of a path", autocomplete: "off" });
    const groups = new Map<string, HTMLElement[]>();
    for (const [path, methods] of Object.entries(described.paths)) {
      for (const [method, each] of Object.entries(methods)) groups.set(group(path), [...groups.get(group(path)) ?? [], operation(method, path, each)]);
    }
    const sections = [...groups].sort(([a], [b]) => Number(b.startsWith("/")) - Number(a.startsWith("/"))).map(([name, routes]) => h("section", { class: "card" }, h("h2", {}, name), ...routes));
    filter.addEventListener("input", () => {
      for (const section of sections) {
        let any = false;
        for (const route of section.querySelectorAll("details")) {
          const fits = (route.querySelector("summary")?.textContent ?? "").toLowerCase().includes(filter.value.toLowerCase());
          route.hidden = !fits;
          any ||= fits;
        }
        section.hidden = !any;
      }
    });
    set(main, h("h1", {}, `HTTP API ${described.info.version}`), h("p", { class: "tools" }, h("label", { for: "filter" }, "Filter "), filter,
      h("a", { href: "openapi.json" }, "openapi.json")), h("div", { class: "stack" }, ...sections));
  } catch (error) {
    set(main, h("h1", {}, "HTTP API"), failure(error),
      h("p", {}, "If the server wants a key, give it in the ", h("a", { href: "ui" }, "console"), " first, in this tab."));
  }
}

void show();
