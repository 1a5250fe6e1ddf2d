// Asks several adapters the same at once, and shows their answers side by side as they come.

import { answer, get } from "./api.js";
import { failure, h, say, set } from "./dom.js";
import { time } from "./format.js";
import type { Page } from "./page.js";

type Part = { type: "text"; text: string } | { type: "image_url"; image_url: { url: string } };
interface Message { role: string; content: string | Part[]; tool_calls?: unknown[] }
interface ToolCall { index: number; id?: string; type?: string; function?: { name?: string; arguments?: string } }
interface Chunk {
  choices?: { delta?: { content?: string | null; reasoning_content?: string | null; tool_calls?: ToolCall[] }; finish_reason?: string | null }[];
  usage?: { completion_tokens?: number } | null;
  error?: { message?: string };
}

const MOST_MODELS = 4;

export function playground(first: string): Page {
  const columns = new Map<string, Column>();
  const shown = h("div", { class: "answers" });
  const names = h("datalist", { id: "models" });
  const add = h("input", { id: "add-model", list: "models", autocomplete: "off", placeholder: "name of an adapter" });
  const system = h("textarea", { id: "system", rows: "3" });
  const temperature = number("temperature", "0", "2", "0.1", "0.7"), top_p = number("top_p", "0", "1", "0.05", "1");
  const max_tokens = number("max_tokens", "1", "100000", "1", "128"), seed = number("seed", "0", "4294967295", "1", "");
  const tools = h("textarea", { id: "tools", rows: "4", spellcheck: "false", placeholder: '[{"type": "function", "function": {"name": …}}]' });
  const schema = h("textarea", { id: "schema", rows: "4", spellcheck: "false", placeholder: '{"type": "object", "properties": …}' });
  const question = h("textarea", { id: "question", rows: "3", required: true, keydown: (event) => {
    const key = event as KeyboardEvent;
    if (key.key === "Enter" && (key.ctrlKey || key.metaKey)) { key.preventDefault(); void ask(); }
  } });
  let reading: Promise<string[]> = Promise.resolve([]);
  const files = h("input", { id: "images", type: "file", multiple: true, accept: "image/png,image/jpeg,image/webp,image/gif", change: () => { void choose(); } });
  const chosen = h("p", { class: "pictures" });
  const pictures = h("div", { class: "field", hidden: true }, h("label", { for: "images" }, "Images"), files, chosen);
  const ask_button = h("button", { class: "primary" }, "Send");
  const stop_button = h("button", { type: "button", disabled: true, click: () => { for (const each of columns.values()) each.stop(); } }, "Stop");
  const clear_button = h("button", { type: "button", click: () => { for (const each of columns.values()) each.clear(); } }, "Clear");

  function number(id: string, min: string, max: string, step: string, value: string): HTMLInputElement {
    return h("input", { id, type: "number", min, max, step, value });
  }

  /** Read the chosen files, and show them. */
  async function choose(): Promise<void> {
    reading = Promise.all([...files.files ?? []].map(dataUrl));
    try { set(chosen, ...(await reading).map(thumbnail)); }
    catch (error) { say(`The file cannot be read: ${String(error)}`); choose_none(); }
  }

  function choose_none(): void {
    reading = Promise.resolve([]);
    files.value = "";
    set(chosen);
  }

  function open(name: string): void {
    if (!name || columns.has(name)) return;
    if (columns.size >= MOST_MODELS) { say(`At most ${MOST_MODELS} side by side: close one first.`); return; }
    const column = new Column(name, () => { columns.delete(name); column.element.remove(); });
    columns.set(name, column);
    shown.append(column.element);
  }

  async function ask(): Promise<void> {
    const text = question.value.trim();
    if (!text) { question.focus(); return; }
    if (!columns.size) { say("Choose a model first."); add.focus(); return; }
    const body: Record<string, unknown> = {
      stream: true, stream_options: { include_usage: true }, temperature: temperature.valueAsNumber, top_p: top_p.valueAsNumber,
      max_tokens: max_tokens.valueAsNumber,
    };
    if (seed.value) body.seed = seed.valueAsNumber;
    try {
      if (tools.value.trim()) body.tools = JSON.parse(tools.value) as unknown;
      if (schema.value.trim()) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema.value) as unknown } };
    } catch (error) { say(`Tools and schema are JSON: ${(error as Error).message}`); return; }
    const images = await reading.catch(() => []);
    choose_none();
    question.value = "";
    ask_button.disabled = true;
    stop_button.disabled = false;
    await Promise.all([...columns.values()].map((each) => each.ask(text, images, system.value.trim(), body)));
    ask_button.disabled = false;
    stop_button.disabled = true;
    question.focus();
  }

  void get<{ data: { id: string; input_modalities?: string[] }[] }>("v1/models").then((models) => {
    pictures.hidden = !models.data.some((each) => each.input_modalities?.includes("image"));
    names.append(...models.data.map((each) => h("option", { value: each.id })));
    if (!columns.size) open(first || models.data[0]?.id || "");
  }, () => undefined);
  if (first) open(first);

  const form = h("form", { class: "ask", submit: (event) => { event.preventDefault(); void ask(); } },
    h("label", { for: "question" }, "Message"), question, pictures,
    h("p", { class: "actions" }, ask_button, stop_button, clear_button, h("small", { class: "dim" }, "Ctrl+Enter sends")));
  const settings = h("details", { class: "card settings" }, h("summary", {}, "System prompt, sampling, tools, JSON schema"),
    field("system", "System prompt", system),
    h("div", { class: "numbers" }, field("temperature", "Temperature", temperature), field("top_p", "Top p", top_p),
      field("max_tokens", "Most tokens", max_tokens), field("seed", "Seed", seed)),
    field("tools", "Tools (JSON)", tools), field("schema", "JSON schema of the answer", schema));
  if (window.innerWidth > 900) settings.open = true;
  const chooser = h("form", { class: "tools", submit: (event) => { event.preventDefault(); open(add.value.trim()); add.value = ""; } },
    h("label", { for: "add-model" }, "Compare "), add, names, h("button", {}, "Add"));
  return {
    title: "Playground",
    element: h("section", { class: "playground" }, h("h1", {}, "Playground"),
      h("div", { class: "sides" }, h("div", {}, settings), h("div", { class: "stack" }, chooser, shown, form))),
    close: () => { for (const each of columns.values()) each.stop(); },
  };
}

function field(id: string, name: string, input: HTMLElement): HTMLElement {
  return h("p", { class: "field" }, h("label", { for: id }, name), input);
}

function thumbnail(url: string): HTMLElement { return h("img", { src: url, alt: "", class: "picture" }); }

function dataUrl(file: File): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => { resolve(reader.result as string); });
    reader.addEventListener("error", () => { reject(reader.error ?? new Error(file.name)); });
    reader.readAsDataURL(file);
  });
}

/** One model's conversation. */
class Column {
  readonly element: HTMLElement;
  private messages: Message[] = [];
  private readonly log: HTMLElement;
  private aborter: AbortController | null = null;

  constructor(private readonly name: string, close: () => void) {
    this.log = h("div", { class: "log", role: "log", "aria-label": `Conversation with ${name}`, tabindex: "0" });
    this.element = h("section", { class: "card answer", "aria-label": name },
      h("h2", {}, name, h("button", { type: "button", class: "quiet", "aria-label": `Close ${name}`, click: () => { this.stop(); close(); } }, "×")), this.log);
  }

  stop(): void { this.aborter?.abort(); }

  clear(): void { this.stop(); this.messages = []; this.log.replaceChildren(); }

  async ask(text: string, images: string[], system: string, body: Record<string, unknown>): Promise<void> {
    const parts: Part[] = images.map((url) => ({ type: "image_url", image_url: { url } }));
    this.messages.push({ role: "user", content: images.length ? [...parts, { type: "text", text }] : text });
    const said = h("div", { class: "says" }), note = h("p", { class: "note dim" });
    this.log.append(h("p", { class: "asks" }, ...images.map(thumbnail), text), said, note);
    const id = crypto.getRandomValues(new Uint32Array(3)).reduce((all, part) => all + part.toString(16).padStart(8, "0"), "ui-");
    const messages = system ? [{ role: "system", content: system }, ...this.messages] : this.messages;
    const aborter = this.aborter = new AbortController(), started = performance.now();
    let content = "", ttft = 0, tokens = 0, ended = "";
    const calls: { id: string; type: string; function: { name: string; arguments: string } }[] = [];
    try {
      for await (const data of answer("v1/chat/completions", { model: this.name, messages, ...body }, id, aborter.signal)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data) as Chunk;
        if (chunk.error) throw new Error(chunk.error.message ?? "the answer ended with an error");
        tokens = chunk.usage?.completion_tokens ?? tokens;
        const choice = chunk.choices?.[0];
        if (!choice) continue;
        ended = choice.finish_reason ?? ended;
        const more = choice.delta?.content ?? "", thought = choice.delta?.reasoning_content ?? "";
        for (const part of choice.delta?.tool_calls ?? []) {
          const call = calls[part.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } };
          call.id += part.id ?? "";
          call.function.name += part.function?.name ?? "";
          call.function.arguments += part.function?.arguments ?? "";
        }
        if (!ttft && (more || thought || calls.length)) ttft = performance.now() - started;
        if (thought) append(said, "thinks", thought);
        if (more) { append(said, "text", more); content += more; }
        this.log.scrollTop = this.log.scrollHeight;
      }
    } catch (error) {
      if (aborter.signal.aborted) ended = "stopped";
      else said.append(failure(error));
    }
    for (const call of calls) said.append(h("pre", {}, `${call.function.name}(${call.function.arguments})`));
    const message: Message = { role: "assistant", content };
    if (calls.length) message.tool_calls = calls;
    if (content || calls.length) this.messages.push(message);
    else this.messages.pop();
    const seconds = (performance.now() - started) / 1000;
    note.append(`TTFT ${time(ttft / 1000)}, ${tokens} tokens in ${time(seconds)}${ended && ended !== "stop" ? `, ${ended}` : ""} · `,
      h("a", { href: `#/requests/${id}` }, "timeline"));
    this.log.scrollTop = this.log.scrollHeight;
  }
}

function append(said: HTMLElement, kind: string, text: string): void {
  const last = said.lastElementChild;
  if (last?.classList.contains(kind)) last.append(text);
  else said.append(h("p", { class: kind }, text));
}
