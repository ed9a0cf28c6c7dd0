// Why the router chose as it did: in words, and as bars of what it foresaw for each node.
import { byId, make, many, seconds, svg, table } from "/assets/dom.js";
import { colourOf } from "/assets/live.js";
import { drawWay } from "/assets/way.js";

const PARTS = [["wait", "queue_seconds", "waiting"], ["restore", "restore_seconds", "restoring"], ["prefill", "prefill_seconds", "computing"], ["look", "look_seconds", "looking at pictures"]];

let shown = null;

// Where the rows of a prompt came from, as one bar.
export function originBar(resident, restored, computed) {
  const all = Math.max(1, resident + restored + computed);
  const bar = make("div", { class: "origin", role: "img", "aria-label": `${resident} rows in memory, ${restored} restored, ${computed} computed`, "data-tip": `${many(resident, "row")} in memory, ${restored} restored, ${computed} computed` });
  for (const [kind, n] of [["reuse", resident], ["restore", restored], ["prefill", computed]]) {
    if (!n) continue;
    const part = make("i", { class: kind });
    part.style.flexGrow = n / all;
    bar.append(part);
  }
  return bar;
}

function why(stay) {
  const chosen = stay.candidates.find((c) => c.chosen);
  if (!chosen) return "The router's reasons are not known any more.";
  const others = stay.candidates.filter((c) => !c.chosen && c.predicted_seconds > 0);
  const next = others.sort((a, b) => a.predicted_seconds - b.predicted_seconds)[0];
  const rows = [
    chosen.n_resident ? `${many(chosen.n_resident, "row")} of the prompt ${chosen.n_resident === 1 ? "was" : "were"} in its memory` : "",
    chosen.n_restored ? `${many(chosen.n_restored, "row")} could be restored from the store` : "",
    chosen.n_computed ? `${many(chosen.n_computed, "row")} had to be computed` : "",
  ].filter(Boolean);
  const list = rows.length > 1 ? `${rows.slice(0, -1).join(", ")} and ${rows.at(-1)}` : rows[0] ?? "nothing had to be done first";
  let text = `${chosen.node_id} was to bring the first token ${seconds(chosen.predicted_seconds)} after it got the turn: ${list}.`;
  if (!stay.candidates.some((c) => !c.chosen)) text += " There was no other node to choose.";
  else if (!next) text += " No other node could take it.";
  else if (next.predicted_seconds - chosen.predicted_seconds < 0.0005) text += ` ${next.node_id} would have taken as long.`;
  else text += ` The next best, ${next.node_id}, would have taken ${seconds(next.predicted_seconds)}: ${seconds(next.predicted_seconds - chosen.predicted_seconds)} longer.`;
  return text;
}

function bars(stay) {
  const actual = stay.first_token_ms ? (stay.first_token_ms - stay.placed_ms) / 1000 : 0;
  const most = 1.03 * Math.max(0.001, actual, ...stay.candidates.map((c) => c.predicted_seconds));
  const lines = stay.candidates.map((c) => {
    let at = 0;
    const marks = PARTS.flatMap(([kind, field, text]) => {
      if (!c[field]) return [];
      const from = at;
      at += c[field];
      return [svg("rect", { class: kind, x: `${100 * from / most}%`, y: 3, width: `${Math.max(0.3, 100 * c[field] / most)}%`, height: 14, "data-tip": `${c.node_id}: ${text} ${seconds(c[field])}` })];
    });
    if (c.chosen && actual) marks.push(svg("line", { class: "actual", x1: `${100 * actual / most}%`, x2: `${100 * actual / most}%`, y1: 0, y2: 20, "data-tip": `it came after ${seconds(actual)}` }));
    return make("li", { class: c.chosen ? "chosen" : "" },
      make("span", { class: `who ${colourOf(c.node_id)}` }, c.chosen ? "✓ " : "", c.node_id),
      svg("svg", { height: 20, width: "100%", role: "img", "aria-label": `${c.node_id}, foreseen ${seconds(c.predicted_seconds)}` }, ...marks),
      make("span", { class: "n" }, c.predicted_seconds ? seconds(c.predicted_seconds) : "–"));
  });
  return make("ul", { class: "foreseen" }, ...lines);
}

function stayParts(stay) {
  const columns = [["node", "name"], ["in memory", "n"], ["in store", "n"], ["running", "n"], ["waiting", "n"], ["foreseen", "n"], ["why", "why"]];
  const rows = stay.candidates.map((c) => ({ kind: c.chosen ? "chosen" : "", cells: [c.node_id, c.n_resident, c.n_stored, c.n_running, c.n_queued, c.predicted_seconds ? seconds(c.predicted_seconds) : "–", c.reason] }));
  const came = stay.first_token_ms ? ` It came after ${seconds((stay.first_token_ms - stay.placed_ms) / 1000)}${stay.candidates.length ? ", the line in the picture" : ""}.` : "";
  return [
    make("h3", {}, `Why ${stay.node_id}`, make("small", {}, stay.first_index ? ` from token ${stay.first_index} on` : ""), stay.lost ? make("span", { class: "state dead" }, `lost: ${stay.lost}`) : null),
    make("p", {}, why(stay), came),
    originBar(stay.n_resident, stay.n_restored, stay.n_computed),
    ...(stay.candidates.length ? [bars(stay), table(columns, rows)] : []),
  ];
}

export function explain(turn) {
  shown = turn;
  byId("decision").replaceChildren(
    make("section", { class: "panel decision" },
      make("h2", {}, "Why this turn went where it went"),
      make("p", { class: "small" }, "session ", make("a", { href: `#sessions/${encodeURIComponent(turn.session_id)}`, class: "mono" }, turn.session_id),
        `: ${many(turn.n_prompt, "token")} of prompt, ${turn.n_history} of them from before; ${turn.n_tokens} of answer${turn.reason ? `, ended: ${turn.reason}` : ""}`,
        turn.longest_pause_ms ? `; paused ${seconds(turn.longest_pause_ms / 1000)} for the change of node` : ""),
      ...drawWay(turn, byId("decision").clientWidth - 34),
      ...turn.stays.flatMap(stayParts)),
  );
}

// While the turn that is explained goes on.
export function redrawDecision(turn) {
  if (shown && turn.turn_id === shown.turn_id && turn.session_id === shown.session_id && turn.stays.length !== shown.stays.length) explain(turn);
}
