// One turn from its beginning to its end: a bar as wide as its place, and each phase in words.
import { make, svg } from "/assets/dom.js";
import { phasesOf } from "/assets/phases.js";
import { segments } from "/assets/timeline.js";

export function drawWay(turn, width) {
  const now = turn.ended_ms || Date.now();
  const wide = Math.max(160, width);
  const span = Math.max(1000, now - turn.began_ms);
  const phases = phasesOf(turn, now);
  const told = phases.filter((phase) => phase.to - phase.from >= 1 || phase.kind === "reuse");
  return [
    svg("svg", { class: "way", viewBox: `0 0 ${wide} 18`, height: 18, preserveAspectRatio: "none", role: "img", "aria-label": told.map((phase) => phase.text).join("; ") },
      ...segments(phases, (ms) => wide * (ms - turn.began_ms) / span, 2, wide)),
    make("ol", { class: "steps" }, ...told.map((phase) => make("li", { class: phase.kind }, phase.text))),
  ];
}
