// Makes elements. Text is always set as text, so nothing that a server says becomes markup.

export type Child = Node | string | number | null | undefined | false;
type Attributes = Record<string, string | number | boolean | null | undefined | ((event: Event) => void)>;

/** Return an element; attributes that are functions listen to the event of that name. */
export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  fill(element, attributes, children);
  return element;
}

/** Return an element of SVG. */
export function svg(tag: string, attributes: Attributes = {}, ...children: Child[]): SVGElement {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  fill(element, attributes, children);
  return element;
}

function fill(element: Element, attributes: Attributes, children: Child[]): void {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  add(element, children);
}

function add(element: Element, children: Child[]): void {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    element.append(typeof child === "number" ? String(child) : child);
  }
}

/** Replace what an element holds. */
export function set(element: Element, ...children: Child[]): void {
  element.replaceChildren();
  add(element, children);
}

/** Return an error as a paragraph, which screen readers say at once. */
export function failure(error: unknown): HTMLElement {
  return h("p", { class: "bad", role: "alert" }, error instanceof Error ? error.message : String(error));
}

/** Return a link to the page of an adapter. */
export function adapterLink(name: string): HTMLElement {
  return h("a", { href: `#/adapters/${encodeURIComponent(name)}` }, name);
}

/** Set the text of an element, unless it has it: screen readers say what changes. */
export function setText(element: Element, text: string): void {
  if (element.textContent !== text) element.textContent = text;
}

/** Say something short for everyone, also to screen readers. */
export function say(text: string): void {
  const said = document.getElementById("said");
  if (!said) return;
  said.textContent = text;
  said.classList.add("shown");
  window.setTimeout(() => {
    if (said.textContent === text) {
      said.textContent = "";
      said.classList.remove("shown");
    }
  }, 6000);
}

/** Ask before something is done; resolves to whether it shall be. */
export function confirmed(question: string, action: string): Promise<boolean> {
  return new Promise((resolve) => {
    const yes = h("button", { value: "yes", class: "danger" }, action);
    const dialog = h(
      "dialog",
      { "aria-labelledby": "question", close: () => { resolve(dialog.returnValue === "yes"); dialog.remove(); } },
      h("form", { method: "dialog" },
        h("p", { id: "question" }, question),
        h("p", { class: "actions" }, h("button", { value: "no", autofocus: true }, "Cancel"), yes)),
    );
    document.body.append(dialog);
    dialog.showModal();
  });
}
