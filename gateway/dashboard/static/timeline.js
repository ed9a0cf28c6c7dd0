// Turns as rows of coloured segments on one axis of time; by turn, or by node.
import { make, many, svg } from "/assets/dom.js";
import { cluster, colourOf, turns } from "/assets/live.js";
import { inWords, nodesOf, phasesOf } from "/assets/phases.js";

const ROW = 24, BAR = 14, MOST_ROWS = 40;

// The rects of phases on one line; x: milliseconds → pixels.
export function segments(phases, x, y, width) {
  return phases.map((phase) => {
    const from = Math.max(0, x(phase.from));
    const to = Math.min(width, Math.max(x(phase.to), from + (phase.kind === "reuse" ? 4 : 2)));
    if (to <= 0 || from >= width) return null;
    const shift = phase.kind === "reuse" ? 4 : 0; // it takes no time: it stands before what follows
    return svg("rect", { class: phase.kind, x: Math.max(0, from - shift).toFixed(1), y, width: (to - from).toFixed(1), height: BAR, rx: 2, "data-tip": phase.text });
  }).filter(Boolean);
}

function axis(spanMs, width) {
  const step = spanMs / (width < 500 ? 2 : 4);
  const marks = [];
  for (let ms = 0; ms <= spanMs; ms += step) {
    const at = width * (1 - ms / spanMs);
    const anchor = ms === 0 ? "end" : ms === spanMs ? "start" : "middle";
    const label = ms === 0 ? "now" : spanMs > 60_000 ? `−${ms / 60_000} min` : `−${ms / 1000} s`;
    marks.push(svg("text", { x: at, y: 11, "text-anchor": anchor }, label));
  }
  return svg("svg", { class: "axis", viewBox: `0 0 ${width} 14`, height: 14, "aria-hidden": "true" }, ...marks);
}

export class Timeline {
  spanMs = 60_000;
  byNode = false;
  #rows = new Map();
  #picked = "";

  constructor(place, { onPick, empty }) {
    this.place = place;
    this.onPick = onPick;
    this.empty = empty;
    this.list = make("div", { class: "lines" });
    this.foot = make("div", { class: "line foot" });
    place.onkeydown = (event) => this.#move(event);
  }

  draw(now = Date.now()) {
    const shown = [...turns].filter(([, turn]) => !turn.ended_ms || now - turn.ended_ms < this.spanMs)
      .sort(([, a], [, b]) => b.began_ms - a.began_ms).slice(0, MOST_ROWS);
    if (!shown.length && !this.byNode) {
      this.#rows.clear();
      this.place.replaceChildren(make("p", { class: "empty" }, this.empty));
      return;
    }
    if (!this.list.isConnected) this.place.replaceChildren(this.list, this.foot);
    const width = Math.max(120, this.list.clientWidth - (this.list.clientWidth < 480 ? 96 : 168));
    const x = (ms) => width * (1 - (now - ms) / this.spanMs);
    const lines = this.byNode ? this.#nodeLines(shown, now, x, width) : this.#turnLines(shown, now, x, width);
    this.#show(lines);
    this.foot.replaceChildren(make("span", { class: "label" }), axis(this.spanMs, width));
  }

  #turnLines(shown, now, x, width) {
    return shown.map(([key, turn]) => ({
      key, turn, label: nodesOf(turn), words: inWords(turn, now), height: ROW,
      marks: segments(phasesOf(turn, now), x, (ROW - BAR) / 2, width),
    }));
  }

  #nodeLines(shown, now, x, width) {
    const ids = new Set([...cluster.nodes.map((node) => node.node_id), ...shown.flatMap(([, turn]) => nodesOf(turn))]);
    return [...ids].sort().map((id) => {
      const stays = shown.map(([, turn]) => phasesOf(turn, now).filter((phase) => phase.node === id)).filter((phases) => phases.length);
      stays.sort((a, b) => a[0].from - b[0].from);
      const ends = []; // of the lanes of this node: batch mates stand below each other
      const marks = stays.flatMap((phases) => {
        let lane = ends.findIndex((end) => end <= phases[0].from);
        if (lane < 0) lane = ends.push(0) - 1;
        ends[lane] = phases.at(-1).to;
        return segments(phases, x, (ROW - BAR) / 2 + lane * (BAR + 3), width);
      });
      return { key: `node ${id}`, label: [id], words: `${id}: ${many(stays.length, "turn")}`, height: ROW + Math.max(0, ends.length - 1) * (BAR + 3), marks };
    });
  }

  // Rows stay the same elements while they change, or focus would be lost four times a second.
  #show(lines) {
    for (const key of this.#rows.keys()) if (!lines.some((line) => line.key === key)) this.#rows.delete(key);
    const width = Math.max(120, this.list.clientWidth - (this.list.clientWidth < 480 ? 96 : 168));
    const elements = lines.map((line) => {
      let row = this.#rows.get(line.key);
      if (!row) {
        row = make(line.turn ? "button" : "div", { class: "line", type: line.turn ? "button" : undefined }, make("span", { class: "label" }), svg("svg", {}));
        this.#rows.set(line.key, row);
      }
      if (line.turn) {
        row.onclick = () => { this.#picked = line.key; this.onPick(line.turn); this.draw(); };
        row.classList.toggle("picked", this.#picked === line.key);
      }
      row.setAttribute("aria-label", line.words);
      const [label, picture] = row.children;
      if (label.textContent !== line.label.join(" → ")) {
        label.replaceChildren(...line.label.flatMap((id, i) => [i ? " → " : "", make("span", { class: colourOf(id) }, id)]));
        if (!line.label.length) label.textContent = "no node yet";
      }
      picture.setAttribute("viewBox", `0 0 ${width} ${line.height}`);
      picture.setAttribute("height", line.height);
      picture.setAttribute("aria-hidden", "true");
      picture.replaceChildren(...line.marks);
      return row;
    });
    if (elements.length !== this.list.children.length || elements.some((element, i) => this.list.children[i] !== element)) {
      const focused = document.activeElement;
      this.list.replaceChildren(...elements);
      if (elements.includes(focused)) focused.focus({ preventScroll: true });
    }
  }

  #move(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const rows = [...this.list.querySelectorAll("button")];
    const at = rows.indexOf(document.activeElement);
    if (!step || at < 0) return;
    event.preventDefault();
    rows[Math.max(0, Math.min(rows.length - 1, at + step))].focus();
  }
}
