// The store's contents: who shares what, how large and how old, and what lies in one place. Nobody's words.
import { ago, ask, byId, bytes, choice, make, many, table } from "/assets/dom.js";
import { drawIcicle, treeOf } from "/assets/icicle.js";

const POLL_MS = 4000;
const AGES = [[60_000, "age-0", "used in the last minute"], [600_000, "age-1", "10 minutes"], [3_600_000, "age-2", "hour"], [86_400_000, "age-3", "day"], [Infinity, "age-4", "before"]];

let prefixes = [], sessions = [], totals = null;
let tree = treeOf([]);
let focusId = "", pickedId = "", colour = "age";

const at = (id) => (id ? tree.known.get(id) : tree.root);
const focus = () => at(focusId) ?? tree.root;

function tenants() {
  return [...new Set(prefixes.map((prefix) => prefix.namespace))].sort();
}

function kindOf(node) {
  if (colour === "tenant") return `node-${tenants().indexOf(node.namespace) % 6}`;
  if (colour === "shared") return node.n_snapshots > 1 ? "shared" : "alone";
  return node.used_at_ms ? AGES.find(([age]) => Date.now() - node.used_at_ms < age)[1] : "age-4";
}

function legend() {
  const entries = { age: AGES.map(([, kind, text]) => [kind, text]), tenant: tenants().map((name, i) => [`node-${i % 6}`, name || "nobody's in particular"]), shared: [["shared", "several snapshots begin with it"], ["alone", "one snapshot has it"]] };
  byId("tree-legend").replaceChildren(...entries[colour].map(([kind, text]) => make("li", { class: kind }, text)));
}

const sessionsIn = (node) => sessions.filter((session) => node.files?.some((file) => file.name === session.file));
const below = (node) => [node, ...node.children.flatMap(below)];

function crumbs() {
  const way = [];
  for (let node = focus(); node; node = node.parent) way.unshift(node);
  byId("crumbs").replaceChildren(...way.flatMap((node, i) => {
    const name = node.id ? `tokens ${node.start}–${node.end}` : "whole store";
    const step = make("button", { type: "button", class: "link", disabled: node === focus() }, name);
    step.onclick = () => look(node.id);
    return i ? [" › ", step] : [step];
  }));
}

function draw() {
  const place = byId("tree");
  if (!totals) return;
  if (!prefixes.length) {
    place.replaceChildren(make("p", { class: "empty" }, "The store is empty, or there is none. Nodes save a conversation's rows when a turn ends."));
    byId("prefix-detail").replaceChildren();
    return;
  }
  if (!at(pickedId)) pickedId = focusId;
  const picked = pickedId ? at(pickedId) : null;
  const hadFocus = place.contains(document.activeElement);
  place.replaceChildren(drawIcicle(focus(), Math.max(280, place.clientWidth - 18), { kindOf, picked, sessionsAt: (node) => sessionsIn(node).map((session) => session.session_id).join(", ") }));
  if (hadFocus) place.querySelector("[tabindex='0']")?.focus({ preventScroll: true });
  legend();
  crumbs();
}

function detail() {
  const node = pickedId ? at(pickedId) : null;
  const place = byId("prefix-detail");
  if (!node) {
    place.replaceChildren(make("p", { class: "small" }, totals ? `${many(totals.n_snapshots, "snapshot")}, ${bytes(totals.n_bytes)} in all.` : ""));
    return;
  }
  const files = below(node).flatMap((one) => one.files).slice(0, 40);
  const here = sessions.filter((session) => below(node).some((one) => one.files.some((file) => file.name === session.file)));
  const hidden = node.n_children - node.children.length;
  const more = hidden > 0 ? make("button", { type: "button" }, `Fetch ${many(hidden, "branch", "branches")} more`) : null;
  if (more) more.onclick = () => fetchBelow(node.id);
  place.replaceChildren(make("section", { class: "panel" },
    make("h2", {}, `Tokens ${node.start.toLocaleString("en")} to ${node.end.toLocaleString("en")}`),
    make("p", {}, `${node.n_snapshots > 1 ? `${many(node.n_snapshots, "snapshot")} begin with them` : "One snapshot has them"}; ${bytes(node.n_bytes)} lie here and behind it. Tenant: ${node.namespace || "nobody's in particular"}. Model: `, make("span", { class: "mono" }, node.fingerprint.slice(0, 12)), "."),
    here.length ? make("p", {}, "Sessions of the latest that lie here: ", ...here.flatMap((session, i) => [i ? ", " : "", make("a", { class: "mono", href: `#sessions/${encodeURIComponent(session.session_id)}` }, session.session_id)]), ".") : null,
    table([["file", "name mono"], ["rows", "n"], ["bytes", "n"], ["used", ""]], files.map((file) => [file.name, `${file.start} – ${file.end}`, bytes(file.n_bytes), file.used_at_ms ? ago(file.used_at_ms) : "–"])), more));
}

function look(id) {
  focusId = id;
  pickedId = id;
  draw();
  detail();
}

function pick(id) {
  pickedId = id;
  draw();
  detail();
}

function take({ prefixes: found, sessions: lying, ...rest }) {
  sessions = lying;
  totals = rest;
  const ids = new Set(found.map((prefix) => prefix.id));
  const isOf = (prefix) => ids.has(prefix.parent_id) && ids.add(prefix.id); // parents come before what is below them
  prefixes = [...found, ...prefixes.filter((prefix) => prefix.kept && !ids.has(prefix.id) && isOf(prefix))];
  tree = treeOf(prefixes);
  if (!at(focusId)) focusId = "";
}

async function fetchBelow(id) {
  const { prefixes: found } = await ask(`/dashboard/store?below=${encodeURIComponent(id)}`);
  const ids = new Set(found.map((prefix) => prefix.id));
  prefixes = [...prefixes.filter((prefix) => !ids.has(prefix.id)), ...found.map((prefix) => ({ ...prefix, kept: true }))];
  tree = treeOf(prefixes);
  draw();
  detail();
}

function move(event) {
  const node = pickedId ? at(pickedId) : focus().children[0];
  if (!node) return;
  const siblings = node.parent?.children ?? [];
  const beside = siblings[siblings.indexOf(node) + { ArrowDown: 1, ArrowUp: -1 }[event.key]];
  const to = { ArrowRight: node.children[0], ArrowLeft: node.parent?.id ? node.parent : null, ArrowDown: beside, ArrowUp: beside }[event.key];
  if (event.key === "Enter" || event.key === " ") look(node.id);
  else if (event.key === "Escape") look(focus().parent?.id ?? "");
  else if (to) pick(to.id);
  else return;
  event.preventDefault();
  byId("tree").querySelector("[tabindex='0']")?.focus();
}

export function startStore() {
  const refresh = () => byId("store").hidden || ask("/dashboard/store").then((body) => { take(body); draw(); detail(); })
    .catch((error) => byId("prefix-detail").replaceChildren(make("p", { class: "trouble" }, error.message)));
  byId("tree").onkeydown = move;
  byId("tree").onclick = (event) => {
    const id = event.target.closest("[data-id]")?.dataset.id;
    if (id) look(id === focusId ? at(id).parent?.id ?? "" : id);
  };
  choice("colour", (value) => { colour = value; draw(); });
  window.addEventListener("resize", () => byId("store").hidden || draw());
  setInterval(refresh, POLL_MS);
  return refresh;
}
