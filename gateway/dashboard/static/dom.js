// Elements, requests, and how numbers are written. Text never becomes markup: it is set as text, or as an attribute.

export const byId = (id) => document.getElementById(id);

const AS_PROPERTY = new Set(["onclick", "onkeydown", "onpointermove", "onpointerleave", "disabled", "hidden", "type", "value", "min", "max"]);

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (AS_PROPERTY.has(name)) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const make = (tag, properties = {}, ...children) => fill(document.createElement(tag), properties, children);

export const svg = (tag, properties = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);

// The mark of the house.
export const ferry = () => svg("svg", { class: "ferry", viewBox: "0 0 24 20", "aria-hidden": "true" }, svg("path", { d: "M1 12h22l-3 6H4zM5 11V5h8l5 6M8 5V2h2v3" }));

// The API token that was entered, where the cluster wants one; it is kept until the page is closed.
export const token = { get: () => sessionStorage.getItem("kvferry-token") ?? "", set: (value) => sessionStorage.setItem("kvferry-token", value.trim()) };
export const credentials = () => (token.get() ? { authorization: `Bearer ${token.get()}` } : {});

export async function ask(path, options) {
  const response = await fetch(path, { ...options, headers: credentials() });
  const body = await response.json();
  if (!response.ok) throw new Error(body.error?.message ?? response.statusText);
  return body;
}

// What went wrong; a TypeError is fetch's, whose words differ from browser to browser.
export const complaint = (error) => (error instanceof TypeError ? "The gateway does not answer." : error.message);

// Each event of a stream.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
  }
}

// A table whose cells are text or elements; columns: [title, class].
export function table(columns, rows, caption) {
  const cell = (value, [, kind]) => make("td", { class: kind }, value instanceof Node ? value : String(value ?? ""));
  return make("div", { class: "scroll" }, make("table", {},
    caption ? make("caption", {}, caption) : null,
    make("thead", {}, make("tr", {}, ...columns.map(([title, kind]) => make("th", { class: kind, scope: "col" }, title)))),
    make("tbody", {}, ...rows.map((row) => make("tr", { class: row.kind }, ...columns.map((column, i) => cell((row.cells ?? row)[i], column)))))));
}

export function bytes(n) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (n >= size) return `${n / size >= 100 ? Math.round(n / size) : (n / size).toFixed(1)} ${unit}`;
  }
  return `${n} B`;
}

export function seconds(s) {
  if (s < 0.0005) return "0 s";
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  return s < 100 ? `${s.toFixed(s < 10 ? 2 : 1)} s` : `${Math.round(s / 60)} min`;
}

export function ago(ms, now = Date.now()) {
  const s = Math.max(0, now - ms) / 1000;
  if (s < 90) return `${Math.round(s)} s ago`;
  if (s < 5400) return `${Math.round(s / 60)} min ago`;
  return s < 129_600 ? `${Math.round(s / 3600)} h ago` : `${Math.round(s / 86_400)} days ago`;
}

export const many = (n, one, more = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : more}`;

// A group of buttons of which one is pressed.
export function choice(attribute, onChange) {
  const buttons = [...document.querySelectorAll(`[data-${attribute}]`)];
  for (const button of buttons) {
    button.onclick = () => {
      for (const other of buttons) other.setAttribute("aria-pressed", other === button);
      onChange(button.dataset[attribute]);
    };
  }
}

// The text of whatever the pointer or the focus is on: [data-tip].
export function startTips() {
  const tip = byId("tip");
  const show = (element, x, y) => {
    tip.textContent = element.dataset.tip;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(x + 12, innerWidth - box.width - 8))}px`;
    tip.style.top = `${y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18}px`;
  };
  document.addEventListener("pointermove", (event) => {
    const element = event.target.closest?.("[data-tip]");
    if (element) show(element, event.clientX, event.clientY);
    else tip.hidden = true;
  });
  document.addEventListener("focusin", (event) => {
    const element = event.target.closest?.("[data-tip]");
    const box = element?.getBoundingClientRect();
    if (element && event.target.matches(":focus-visible")) show(element, box.left, box.bottom - 12);
    else tip.hidden = true;
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hidden = true; });
}
