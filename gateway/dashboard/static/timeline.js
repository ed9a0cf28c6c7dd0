// Turns as bars: what each waited for, and where it was when its node was lost.
import { byId, make } from "/assets/app.js";

const SPAN_MS = 120_000;
const ROW = 22;
const LABEL = 130;
const turns = new Map();

export function keepTurn(turn) {
  turns.set(`${turn.session_id}/${turn.turn_id}`, turn);
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// The phases of a turn as [kind, from, to, what], in milliseconds since 1970.
function phases(turn, now) {
  const found = [];
  let last = turn.began_ms;
  let wasLost = false;
  for (const stay of turn.stays) {
    if (wasLost) found.push(["pause", last, stay.placed_ms, "its node was lost"]);
    else if (stay.placed_ms > last) found.push(["queue", last, stay.placed_ms, "waits for a node"]);
    let at = stay.placed_ms;
    for (const [kind, ms, what] of [
      ["queue", stay.queue_ms, "waits"],
      ["restore", stay.restore_ms, `restores ${stay.n_restored} rows`],
      ["prefill", stay.prefill_ms, `computes ${stay.n_computed} rows; ${stay.n_resident} were in memory`],
    ]) {
      if (ms > 0) found.push([wasLost ? "pause" : kind, at, at + ms, `${stay.node_id} ${what}`]);
      at += ms;
    }
    const until = stay.last_token_ms || now;
    found.push(["decode", stay.first_token_ms || at, until, `${stay.node_id}: ${stay.n_tokens} tokens`]);
    last = until;
    wasLost = Boolean(stay.lost);
  }
  if (wasLost && !turn.ended_ms) found.push(["pause", last, now, "its node was lost"]);
  if (!turn.stays.length && !turn.ended_ms) found.push(["queue", last, now, "waits for a node"]);
  return found;
}

function row(turn, number, now, width) {
  const x = (ms) => LABEL + Math.max(0, 1 - (now - ms) / SPAN_MS) * (width - LABEL);
  const y = number * ROW + 4;
  const nodes = turn.stays.map((stay) => stay.node_id).join(" → ") || "no node yet";
  const bars = phases(turn, now)
    .filter(([, , to]) => now - to < SPAN_MS)
    .map(([kind, from, to, what]) =>
      svg("rect", { class: kind, x: x(from), y, width: Math.max(1.5, x(to) - x(from)), height: ROW - 8, rx: 2 }, svg("title", {}, what)));
  const group = svg("g", { tabindex: 0, role: "button", "aria-label": `turn on ${nodes}` },
    svg("rect", { x: 0, y: y - 4, width, height: ROW, fill: "transparent" }),
    svg("text", { x: 0, y: y + 11 }, nodes.slice(0, 22)), ...bars);
  group.addEventListener("click", () => explain(turn));
  group.addEventListener("keydown", (event) => event.key === "Enter" && explain(turn));
  return group;
}

export function drawTimeline() {
  const place = byId("timeline");
  if (place.closest("[hidden]") || place.matches(":focus-within:has(g:focus)")) return;
  const now = Date.now();
  for (const [key, turn] of turns) if (turn.ended_ms && now - turn.ended_ms > SPAN_MS) turns.delete(key);
  const shown = [...turns.values()].sort((a, b) => b.began_ms - a.began_ms).slice(0, 40);
  if (!shown.length) {
    place.replaceChildren(make("p", {}, "No turn lately. Say something on the chat page, or through the API."));
    return;
  }
  const width = Math.max(place.clientWidth - 14, 300);
  place.replaceChildren(svg("svg", { viewBox: `0 0 ${width} ${shown.length * ROW + 6}`, height: shown.length * ROW + 6, "data-turns": shown.length }, ...shown.map((turn, number) => row(turn, number, now, width))));
}

const seconds = (value) => `${value.toFixed(3)} s`;

// Why the router chose as it did.
function explain(turn) {
  const parts = turn.stays.map((stay) =>
    make("div", {},
      make("p", {}, `${stay.node_id}, from token ${stay.first_index}: foreseen ${seconds(stay.predicted_ms / 1000)} to the first token${stay.first_token_ms ? `, it came after ${seconds((stay.first_token_ms - stay.placed_ms) / 1000)}` : ""}.${stay.lost ? ` Lost: ${stay.lost}.` : ""}`),
      make("table", {},
        make("thead", {}, make("tr", {}, ...["node", "in memory", "in store", "queue", "restore", "prefill", "in all", "why"].map((name) => make("th", {}, name)))),
        make("tbody", {}, ...stay.candidates.map((c) =>
          make("tr", { class: c.chosen ? "chosen" : "" }, ...[c.node_id, c.n_resident, c.n_stored, seconds(c.queue_seconds), seconds(c.restore_seconds), seconds(c.prefill_seconds), seconds(c.predicted_seconds), c.reason].map((value) => make("td", {}, String(value)))))))));
  byId("decision").replaceChildren(
    make("h2", {}, "Turn of session ", make("span", { class: "mono" }, turn.session_id)),
    make("p", {}, `${turn.n_prompt} tokens of prompt, ${turn.n_history} of them from before; ${turn.n_tokens} of answer${turn.reason ? `; ended: ${turn.reason}` : ""}. Longest pause ${seconds(turn.longest_pause_ms / 1000)}.`),
    ...parts);
}
