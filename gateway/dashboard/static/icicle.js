// A tree of prefixes as blocks: token positions from left to right, snapshots from top to bottom.
import { ago, bytes, many, svg } from "/assets/dom.js";

const THIN = 3; // pixels below which blocks run into one
const TALL = 420, LOW = 150;

// The flat list as a tree; what is under several roots gets one root of its own.
export function treeOf(prefixes) {
  const known = new Map(prefixes.map((prefix) => [prefix.id, { ...prefix, children: [] }]));
  const roots = [];
  for (const node of known.values()) {
    node.parent = known.get(node.parent_id) ?? null;
    (node.parent?.children ?? roots).push(node);
  }
  const root = { id: "", start: 0, end: 0, files: [], children: roots, parent: null, n_children: roots.length, n_snapshots: roots.reduce((sum, node) => sum + node.n_snapshots, 0) };
  for (const node of roots) node.parent = root;
  const visit = (node) => {
    node.children.forEach(visit);
    node.children.sort((a, b) => b.n_snapshots - a.n_snapshots || b.end - a.end || a.id.localeCompare(b.id));
    node.n_bytes = [...node.files, ...node.children].reduce((sum, part) => sum + part.n_bytes, 0);
    node.used_at_ms = Math.max(0, ...[...node.files, ...node.children].map((part) => part.used_at_ms));
    node.furthest = Math.max(node.end, ...node.children.map((child) => child.furthest));
  };
  visit(root);
  return { root, known };
}

export function inWords(node) {
  if (!node.id) return "everything";
  const shared = node.n_snapshots > 1 ? `, shared by ${many(node.n_snapshots, "snapshot")}` : "";
  return `tokens ${node.start} to ${node.end}${shared}, ${bytes(node.n_bytes)} from here on${node.namespace ? `, tenant ${node.namespace}` : ""}${node.used_at_ms ? `, used ${ago(node.used_at_ms)}` : ""}`;
}

// The blocks of what lies below `root`; kindOf: block → class; sessionsAt: block → names.
export function drawIcicle(root, width, { kindOf, picked, sessionsAt }) {
  const from = root.id ? root.start : 0;
  const span = Math.max(1, root.furthest - from);
  const height = Math.max(LOW, Math.min(TALL, 26 * Math.max(1, root.n_snapshots)));
  const x = (token) => (token - from) / span * (width - 2);
  const marks = [];
  const place = (node, top, bottom) => {
    const tall = bottom - top;
    if (node.id) {
      const wide = Math.max(1, x(node.end) - x(node.start));
      const block = svg("g", { class: `block ${kindOf(node)} ${node === picked ? "picked" : ""}`, role: "treeitem", tabindex: node === (picked ?? root.children[0]) ? 0 : -1, "aria-label": inWords(node), "aria-selected": node === picked, "data-id": node.id, "data-tip": inWords(node) },
        svg("rect", { x: (1 + x(node.start)).toFixed(1), y: top.toFixed(1), width: wide.toFixed(1), height: Math.max(1, tall - 1).toFixed(1), rx: Math.min(3, tall / 3) }));
      const text = sessionsAt(node);
      if (tall > 13 && wide > 46) {
        const words = text || (node.n_snapshots > 1 ? `${node.end - node.start} tokens × ${node.n_snapshots}` : `${node.end - node.start} tokens`);
        block.append(svg("text", { x: (x(node.start) + 7).toFixed(1), y: (top + Math.min(tall / 2, 40) + 4).toFixed(1) }, words.slice(0, Math.max(1, Math.floor((wide - 10) / 6.4)))));
      }
      marks.push(block);
    }
    let at = top;
    const each = tall / Math.max(1, node.n_snapshots);
    let hidden = 0;
    for (const child of node.children) {
      const next = at + each * child.n_snapshots;
      if (next - at < THIN) hidden += child.n_snapshots;
      else place(child, at, next);
      at = next;
    }
    if (hidden) marks.push(svg("rect", { class: "more", x: 1 + x(node.end), y: at - each * hidden, width: 10, height: Math.max(2, each * hidden), "data-tip": `${many(hidden, "snapshot")} more: look into the block to the left` }));
  };
  place(root, 0, height);
  const ticks = Array.from({ length: 5 }, (_, i) => Math.round(from + span * i / 4));
  const axis = ticks.map((token, i) => svg("text", { class: "tick", x: Math.max(1, Math.min(width - 1, x(token))), y: height + 14, "text-anchor": i === 0 ? "start" : i === 4 ? "end" : "middle" }, token.toLocaleString("en")));
  return svg("svg", { viewBox: `0 0 ${width} ${height + 18}`, height: height + 18, role: "tree", "aria-label": "Stored prefixes" }, ...marks, ...axis);
}
