// Talks to the server that this page came from, with the key that the user gave for this tab.

const KEY = "lorikeet-key";

export class ApiError extends Error {
  constructor(readonly status: number, message: string) { super(message); }
}

export function key(): string { return sessionStorage.getItem(KEY) ?? ""; }
export function setKey(value: string): void {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

async function open(path: string, options: RequestInit): Promise<Response> {
  const headers = new Headers(options.headers);
  if (key()) headers.set("Authorization", `Bearer ${key()}`);
  if (options.body) headers.set("Content-Type", "application/json");
  const answer = await fetch(path, { ...options, headers, cache: "no-store" });
  if (answer.ok) return answer;
  let message = `${answer.status} ${answer.statusText}`;
  try {
    const body = await answer.json() as { error?: { message?: string } | string };
    message = typeof body.error === "string" ? body.error : body.error?.message ?? message;
  } catch { /* the body is no JSON */ }
  if (answer.status === 401) document.dispatchEvent(new Event("needs-key"));
  throw new ApiError(answer.status, message);
}

export async function get<T>(path: string): Promise<T> { return await (await open(path, {})).json() as T; }

export async function send<T>(method: string, path: string, body?: unknown): Promise<T> {
  const options: RequestInit = { method };
  if (body !== undefined) options.body = JSON.stringify(body);
  return await (await open(path, options)).json() as T;
}

/** Path of an adapter: its name may have slashes, which stay. */
export function adapterPath(name: string): string {
  return `v1/adapters/${name.split("/").map(encodeURIComponent).join("/")}`;
}

/** Yield the data of server-sent events until they end or `signal` aborts. */
export async function* events(path: string, options: RequestInit): AsyncGenerator<string> {
  const answer = await open(path, options);
  if (!answer.body) return;
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    let end: number;
    while ((end = rest.indexOf("\n\n")) >= 0) {
      const data = rest.slice(0, end).split("\n").filter((line) => line.startsWith("data: "));
      rest = rest.slice(end + 2);
      if (data.length) yield data.map((line) => line.slice(6)).join("\n");
    }
  }
}

/** Post a body and yield the events of its answer, with the id of the request first. */
export async function* answer(path: string, body: unknown, id: string, signal: AbortSignal): AsyncGenerator<string> {
  yield* events(path, { method: "POST", body: JSON.stringify(body), headers: { "X-Request-Id": id }, signal });
}
