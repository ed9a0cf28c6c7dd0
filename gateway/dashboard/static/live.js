// What is known of the cluster at the moment, and who wants to be told when it changes.
import { ask, complaint, credentials, events } from "/assets/dom.js";

const POLL_MS = 1000;
const N_SAMPLES = 300;
const MOST_TURNS = 400;

export const cluster = { nodes: [], can_kill: false, history: new Map() };
export const turns = new Map(); // "session/turn" → what is known of it

const listeners = { cluster: [], turns: [], trouble: [] };
export const on = (what, listener) => listeners[what].push(listener);
const tell = (what, ...news) => listeners[what].forEach((listener) => listener(...news));

function remember(history) {
  for (const id of cluster.history.keys()) if (!(id in history)) cluster.history.delete(id);
  for (const [id, samples] of Object.entries(history)) {
    const known = cluster.history.get(id) ?? [];
    const last = known.at(-1)?.[0] ?? 0;
    cluster.history.set(id, [...known, ...samples.filter(([at]) => at > last)].slice(-N_SAMPLES));
  }
}

async function poll(path) {
  let news = null;
  try {
    news = await ask(path);
  } catch (error) {
    tell("trouble", complaint(error));
  }
  setTimeout(poll, POLL_MS, news ? "/dashboard/cluster" : path);
  if (!news) return;
  const { history, ...status } = news;
  Object.assign(cluster, status);
  remember(history);
  tell("trouble", "");
  tell("cluster", cluster);
}

// An EventSource would do, if it could show a token.
async function follow() {
  try {
    const response = await fetch("/dashboard/turns", { headers: { accept: "text/event-stream", ...credentials() } });
    if (response.ok) {
      for await (const turn of events(response)) {
        turns.set(`${turn.session_id}/${turn.turn_id}`, turn);
        if (turns.size > MOST_TURNS) turns.delete(turns.keys().next().value);
        tell("turns", turn);
      }
    }
  } catch {
    // the poll tells that the gateway is away
  }
  setTimeout(follow, POLL_MS);
}

export function startWatching() {
  poll("/dashboard/cluster?history=1");
  follow();
}

export const killNode = (id) => ask(`/dashboard/nodes/${encodeURIComponent(id)}/kill`, { method: "POST" });

// Each node has a colour of its own, the same on all pages.
const N_COLOURS = 6;
const colours = new Map();
export function colourOf(id) {
  for (const node of [...cluster.nodes.map((node) => node.node_id).sort(), id]) {
    if (node && !colours.has(node)) colours.set(node, `node-${colours.size % N_COLOURS}`);
  }
  return colours.get(id) ?? "node-0";
}
