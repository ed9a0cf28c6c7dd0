// Sessions, and where the rows of one lie.
import { ago, ask, byId, make, many, seconds, table } from "/assets/dom.js";
import { originBar } from "/assets/decision.js";
import { colourOf } from "/assets/live.js";
import { placesPicture } from "/assets/places.js";

const POLL_MS = 1500;
const rows = new Map();
let picked = "";

function rowOf(session) {
  let row = rows.get(session.session_id);
  if (!row) {
    row = make("tr", {}, ...Array.from({ length: 7 }, (_, i) => make("td", { class: ["", "wide", "wide", "n", "n", "", ""][i] })));
    const open = make("button", { type: "button", class: "link mono" }, session.session_id);
    open.onclick = () => { location.hash = `sessions/${encodeURIComponent(session.session_id)}`; };
    row.children[0].append(open);
    rows.set(session.session_id, row);
  }
  const texts = [null, session.model, session.tenant || "–", session.n_tokens.toLocaleString("en"), session.n_turns, session.open_turn_id ? "answering" : session.last_node_id || "–", ago(session.updated_at_ms)];
  texts.forEach((text, i) => { if (text !== null && row.children[i].textContent !== String(text)) row.children[i].textContent = text; });
  row.classList.toggle("picked", session.session_id === picked);
  return row;
}

async function showAll() {
  const found = await ask("/dashboard/sessions");
  const place = byId("session-rows");
  const wanted = found.map(rowOf);
  for (const id of rows.keys()) if (!found.some((session) => session.session_id === id)) rows.delete(id);
  if (wanted.length !== place.children.length || wanted.some((row, i) => place.children[i] !== row)) {
    const focused = document.activeElement;
    place.replaceChildren(...wanted);
    if (place.contains(focused)) focused.focus({ preventScroll: true });
  }
  if (!wanted.length) place.replaceChildren(make("tr", {}, make("td", { colspan: 7, class: "empty" }, "No session yet.")));
}

const nodesOf = (turn) => turn.placements.flatMap((p, i) => [i ? " → " : "", make("span", { class: colourOf(p.node_id) }, p.node_id)]);

function turnRow(turn, number) {
  const prefix = turn.placements.at(-1)?.prefix;
  const rows = prefix ? make("div", {}, originBar(prefix.n_resident, prefix.n_restored, prefix.n_computed), make("small", {}, `${prefix.n_resident} in memory, ${prefix.n_restored} restored, ${prefix.n_computed} computed`)) : "not known";
  const first = turn.placements[0]?.first_token_seconds;
  return [number + 1, turn.n_prompt_tokens, turn.n_answer_tokens, first ? seconds(first) : "–", turn.finish_reason, make("span", {}, ...nodesOf(turn)), rows];
}

async function showOne(id) {
  const { session, turns, places } = await ask(`/dashboard/sessions/${encodeURIComponent(id)}`);
  if (id !== picked) return;
  const columns = [["turn", "n"], ["prompt", "n"], ["answer", "n"], ["first token", "n"], ["ended", ""], ["nodes", ""], ["rows of the prompt", "rows"]];
  const from = session.forked_from ? `, forked from ${session.forked_from}` : "";
  byId("session-detail").replaceChildren(
    make("section", { class: "panel" },
      make("h2", {}, "Where its rows lie"),
      make("p", { class: "small" }, make("span", { class: "mono" }, session.session_id), `: ${many(session.n_tokens, "token")} in ${many(session.n_turns, "turn")}, epoch ${session.epoch}${from}`),
      placesPicture(turns, places),
      make("h2", {}, "Its turns"),
      table(columns, turns.map(turnRow))),
  );
}

export function startSessions() {
  const look = () => {
    const page = byId("sessions");
    if (page.hidden) return;
    const wanted = decodeURIComponent(location.hash.match(/^#sessions\/(.+)$/)?.[1] ?? "");
    if (wanted && wanted !== picked) picked = wanted;
    showAll().then(() => picked && showOne(picked)).catch((error) => {
      byId("session-detail").replaceChildren(make("p", { class: "trouble" }, error.message));
      picked = "";
    });
  };
  setInterval(look, POLL_MS);
  window.addEventListener("hashchange", () => { picked = ""; byId("session-detail").replaceChildren(); look(); });
  return look;
}
