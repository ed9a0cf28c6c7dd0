// Drill reports: what was broken on purpose, what was promised, and what came of it.
import { ask, byId, make, seconds, svg, table } from "/assets/dom.js";
import { cluster } from "/assets/live.js";

let picked = "";

const KIND = { held: "passed", broken: "failed" }; // of a verdict
const verdict = (word) => make("span", { class: `verdict ${KIND[word] ?? "other"}` }, String(word ?? "?"));

const when = (text) => {
  const at = new Date(text);
  return Number.isNaN(at.getTime()) ? String(text ?? "–") : at.toLocaleString();
};

const number = (value) => (typeof value === "number" ? value.toLocaleString("en", { maximumFractionDigits: 3 }) : String(value ?? "–"));

function reportRow(report) {
  const open = make("button", { type: "button", class: "link" }, String(report.name ?? report.id));
  open.onclick = () => showOne(report.id).catch((error) => told(error));
  return { kind: report.id === picked ? "picked" : "", cells: [open, String(report.target ?? "–"), when(report.started), typeof report.seconds === "number" ? seconds(report.seconds) : "–", verdict(report.verdict), String(report.reason ?? "")] };
}

function timelinePicture(moments) {
  const known = moments.filter((moment) => moment && typeof moment.at_s === "number");
  if (known.length < 2) return null;
  const last = Math.max(...known.map((moment) => moment.at_s), 0.001);
  const marks = known.map((moment) => svg("circle", { class: `moment ${moment.kind}`, cx: `${1 + 98 * Math.max(0, moment.at_s) / last}%`, cy: 14, r: 5, "data-tip": `${moment.at_s.toFixed(2)} s: ${moment.kind} ${moment.part ?? ""} ${moment.text ?? ""}` }));
  return svg("svg", { class: "moments", height: 28, width: "100%", role: "img", "aria-label": `${known.length} moments in ${last.toFixed(1)} s` }, svg("line", { x1: "1%", x2: "99%", y1: 14, y2: 14 }), ...marks);
}

async function showOne(id) {
  picked = id;
  const report = await ask(`/dashboard/drills/${encodeURIComponent(id)}`);
  const limits = Array.isArray(report.limits) ? report.limits : [];
  const moments = Array.isArray(report.timeline) ? report.timeline : [];
  const figures = Object.entries(report.figures && typeof report.figures === "object" ? report.figures : {});
  byId("drill-detail").replaceChildren(make("section", { class: "panel" },
    make("h2", {}, `${report.name ?? id} on ${report.target ?? "?"} `, verdict(report.verdict)),
    make("p", {}, String(report.hypothesis ?? report.reason ?? "")),
    timelinePicture(moments),
    limits.length ? table([["promise", ""], ["limit", "n"], ["measured", "n"], ["", ""]], limits.map((limit) => ({ kind: limit.held === false ? "broken" : "", cells: [limit.name, `${number(limit.limit)} ${limit.unit ?? ""}`, `${number(limit.measured)} ${limit.unit ?? ""}`, limit.held === undefined ? "" : limit.held ? "held" : "broken"] }))) : null,
    figures.length ? make("h3", {}, "Figures") : null,
    figures.length ? make("dl", { class: "facts figures" }, ...figures.map(([name, value]) => make("div", {}, make("dt", {}, name.replaceAll("_", " ")), make("dd", {}, number(value))))) : null,
    moments.length ? make("h3", {}, "What happened") : null,
    moments.length ? table([["at", "n"], ["what", ""], ["whom", ""], ["", ""]], moments.slice(0, 300).map((moment) => [typeof moment?.at_s === "number" ? `${moment.at_s.toFixed(2)} s` : "", moment?.kind, moment?.part, moment?.text])) : null));
}

const told = (error) => byId("drill-detail").replaceChildren(make("p", { class: "trouble" }, error.message));

export function startDrills() {
  return async () => {
    try {
      const reports = await ask("/dashboard/drills");
      const how = cluster.has_drills ? "No drill was run yet: kvferry drill run NAME." : "The gateway was started without a folder of reports: give it --drill-reports DIR.";
      byId("drill-list").replaceChildren(reports.length ? table([["drill", ""], ["target", ""], ["started", ""], ["took", "n"], ["verdict", ""], ["", "wide"]], reports.map(reportRow)) : make("p", { class: "empty panel" }, how));
    } catch (error) {
      told(error);
    }
  };
}
