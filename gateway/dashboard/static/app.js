// The page's frame: tabs, the cluster's numbers, nodes and sessions.
import { drawTimeline, keepTurn } from "/assets/timeline.js";
import { startChat } from "/assets/chat.js";

const POLL_MS = 1000;
export const byId = (id) => document.getElementById(id);

// An element with text and children; text never becomes markup.
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") element.className = value;
    else if (name.startsWith("aria-") || name === "tabindex" || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

export async function ask(path, options) {
  const response = await fetch(path, options);
  const body = await response.json();
  if (!response.ok) throw new Error(body.error?.message ?? response.statusText);
  return body;
}

export const cluster = { can_kill: false, nodes: [] };

const bytes = (n) => (n >= 2 ** 30 ? `${(n / 2 ** 30).toFixed(1)} GiB` : `${(n / 2 ** 20).toFixed(0)} MiB`);

function showNumbers(status) {
  const live = status.nodes.filter((node) => node.state === "live").length;
  const numbers = [
    ["model", status.models.join(", ")],
    ["nodes live", `${live} of ${status.nodes.length}`],
    ["turns open", status.n_open_turns],
    ["sessions", status.n_sessions],
    ["snapshots", `${status.n_snapshots} (${bytes(status.snapshot_bytes)})`],
    ["failovers", status.n_failovers],
  ];
  byId("numbers").replaceChildren(
    ...numbers.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, String(value)))),
  );
}

function nodeCard(node) {
  const card = make(
    "article", { class: "card" },
    make("h3", {}, node.node_id, make("span", { class: `state ${node.state}` }, node.state)),
    make("p", {}, `${node.n_running} running, ${node.n_queued} waiting, ${node.n_resident_sessions} sessions in memory`),
    make("meter", { min: 0, max: 1, value: node.kv_bytes_used / Math.max(node.kv_bytes_budget, 1), "aria-label": "K/V memory in use" }),
    make("p", {}, `K/V memory ${bytes(node.kv_bytes_used)} of ${bytes(node.kv_bytes_budget)}`),
    make("p", {}, `prefill ${node.prefill_tokens_per_second.toFixed(0)}, decode ${node.decode_tokens_per_second.toFixed(0)} tokens/s`),
    make("p", {}, `${node.kernel_path}, ${node.n_threads} threads, store ${node.store_ok ? "ok" : "away"}`),
  );
  if (cluster.can_kill && node.state === "live") {
    const button = make("button", { class: "kill", type: "button" }, "Kill");
    button.onclick = () => killNode(node.node_id).catch((error) => say(error.message));
    card.append(button);
  }
  return card;
}

export const killNode = (id) => ask(`/dashboard/nodes/${encodeURIComponent(id)}/kill`, { method: "POST" });

function say(text) {
  byId("connection").textContent = text;
}

const ago = (ms) => {
  const seconds = Math.max(0, Date.now() - ms) / 1000;
  if (seconds < 90) return `${seconds.toFixed(0)} s ago`;
  return seconds < 5400 ? `${(seconds / 60).toFixed(0)} min ago` : `${(seconds / 3600).toFixed(0)} h ago`;
};

function sessionRow(session) {
  const row = make(
    "tr", { tabindex: "0" },
    make("td", {}, make("code", {}, session.session_id)), make("td", {}, session.model),
    make("td", { class: "n" }, String(session.n_tokens)), make("td", { class: "n" }, String(session.n_turns)),
    make("td", {}, session.open_turn_id ? "answering" : session.last_node_id), make("td", {}, ago(session.updated_at_ms)),
  );
  row.onclick = () => showSession(session.session_id).catch((error) => say(error.message));
  row.onkeydown = (event) => event.key === "Enter" && row.onclick();
  return row;
}

async function showSession(id) {
  const { session, turns } = await ask(`/dashboard/sessions/${encodeURIComponent(id)}`);
  const parts = turns.map((turn, number) =>
    make("tr", {},
      make("td", { class: "n" }, String(number + 1)), make("td", { class: "n" }, String(turn.n_prompt_tokens)),
      make("td", { class: "n" }, String(turn.n_answer_tokens)), make("td", {}, turn.finish_reason),
      make("td", {}, turn.placements.map((p) => p.node_id).join(" → ")),
      make("td", {}, turn.placements.map((p) => where(p.prefix)).join("; "))));
  byId("session-detail").replaceChildren(
    make("h2", {}, "Session ", make("span", { class: "mono" }, id)),
    make("p", {}, `${session.n_tokens} tokens, epoch ${session.epoch}, last on ${session.last_node_id || "no node since the coordinator started"}.`),
    make("table", {}, make("thead", {}, make("tr", {}, ...["turn", "prompt", "answer", "ended", "nodes", "rows of the prompt"].map((name) => make("th", {}, name)))), make("tbody", {}, ...parts)),
  );
}

const where = (prefix) => prefix ? `${prefix.n_resident} resident, ${prefix.n_restored} restored, ${prefix.n_computed} computed` : "not known";

export function openTab(id) {
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const is = tab.getAttribute("aria-controls") === id;
    tab.setAttribute("aria-selected", is);
    tab.tabIndex = is ? 0 : -1;
    byId(tab.getAttribute("aria-controls")).hidden = !is;
  }
  history.replaceState(null, "", `#${id}`);
}

async function poll() {
  try {
    const status = await ask("/dashboard/cluster");
    Object.assign(cluster, status);
    showNumbers(status);
    byId("nodes").replaceChildren(...status.nodes.map(nodeCard));
    if (!byId("sessions").hidden) {
      byId("session-rows").replaceChildren(...(await ask("/dashboard/sessions")).map(sessionRow));
    }
    say("");
  } catch (error) {
    say(error.message);
  }
  setTimeout(poll, POLL_MS);
}

function watchTurns() {
  const source = new EventSource("/dashboard/turns");
  source.onmessage = (event) => keepTurn(JSON.parse(event.data));
  setInterval(drawTimeline, 250);
}

function start() {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  tabs.forEach((tab, number) => {
    tab.onclick = () => openTab(tab.getAttribute("aria-controls"));
    tab.onkeydown = (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = tabs[(number + step + tabs.length) % tabs.length];
      next.click();
      next.focus();
    };
  });
  byId("theme").onclick = () => {
    const dark = getComputedStyle(document.documentElement).colorScheme === "dark" || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
    document.documentElement.dataset.theme = dark ? "light" : "dark";
  };
  openTab(["sessions", "chat"].includes(location.hash.slice(1)) ? location.hash.slice(1) : "cluster");
  startChat();
  watchTurns();
  poll();
}

start();
