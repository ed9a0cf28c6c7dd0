// The first page: the cluster in numbers, its nodes, its turns.
import { explain, redrawDecision } from "/assets/decision.js";
import { byId, bytes, choice, make } from "/assets/dom.js";
import { killNode, on } from "/assets/live.js";
import { nodeCard } from "/assets/nodes.js";
import { Timeline } from "/assets/timeline.js";

const DRAW_MS = 250;

function showNumbers(status) {
  const live = status.nodes.filter((node) => node.state === "live").length;
  const rate = [...status.history.values()].reduce((sum, samples) => sum + (samples.at(-1)?.[1] ?? 0), 0);
  const numbers = [
    ["nodes live", `${live} of ${status.nodes.length}`, live < status.nodes.length ? "warn" : ""],
    ["tokens a second", rate.toFixed(0)],
    ["turns open", status.n_open_turns],
    ["sessions", status.n_sessions],
    ["snapshots", `${status.n_snapshots.toLocaleString("en")} · ${bytes(status.snapshot_bytes)}`],
    ["failovers", status.n_failovers],
    ["model", status.models.join(", "), "long"],
  ];
  byId("numbers").replaceChildren(
    ...numbers.map(([name, value, kind]) => make("div", { class: kind }, make("dt", {}, name), make("dd", {}, String(value)))),
  );
}

const cards = new Map();

function showNodes(status) {
  const place = byId("nodes");
  for (const node of status.nodes) {
    if (!cards.has(node.node_id)) cards.set(node.node_id, nodeCard(kill));
    cards.get(node.node_id).update(node, status);
  }
  for (const id of cards.keys()) if (!status.nodes.some((node) => node.node_id === id)) cards.delete(id);
  const wanted = status.nodes.map((node) => cards.get(node.node_id).element);
  if (wanted.length !== place.children.length || wanted.some((element, i) => place.children[i] !== element)) place.replaceChildren(...wanted);
  if (!wanted.length) place.replaceChildren(make("p", { class: "empty" }, "No node has registered yet. Start one: kvferry node run --model MODEL --coordinator HOST:PORT."));
  byId("invitation").hidden = !(status.can_kill && status.nodes.filter((node) => node.state === "live").length > 1);
}

const kill = (id) => killNode(id).catch((error) => { byId("connection").textContent = error.message; });

export function startCluster() {
  const timeline = new Timeline(byId("timeline"), {
    onPick: explain,
    empty: "No turn lately. Say something on the chat page, or through the API.",
  });
  choice("span", (span) => { timeline.spanMs = Number(span) * 1000; timeline.draw(); });
  choice("rows", (rows) => { timeline.byNode = rows === "node"; timeline.draw(); });
  on("cluster", (status) => { showNumbers(status); showNodes(status); });
  on("turns", redrawDecision);
  setInterval(() => byId("cluster").hidden || timeline.draw(), DRAW_MS);
}
