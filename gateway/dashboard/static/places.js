// Where a session's rows lie: its tokens from left to right, one lane for each place that has some.
import { ago, bytes, make, many, svg } from "/assets/dom.js";
import { colourOf } from "/assets/live.js";

const LANE = 30, BAR = 18;

function lane(label, kind, marks, text) {
  return make("div", { class: "place" },
    make("span", { class: `label ${kind}` }, label),
    svg("svg", { height: LANE, width: "100%", role: "img", "aria-label": `${label}: ${text}` }, ...marks),
    make("span", { class: "n small" }, text));
}

const block = (kind, from, to, all, tip) =>
  svg("rect", { class: kind, x: `${100 * from / all}%`, y: (LANE - BAR) / 2, width: `${Math.max(0.25, 100 * (to - from) / all)}%`, height: BAR, rx: 3, "data-tip": tip });

function turnBlocks(turns, all) {
  let at = 0;
  return turns.flatMap((turn, number) => {
    const prompt = at, answer = turn.n_prompt_tokens;
    if (!turn.n_answer_tokens) return [];
    at = answer + turn.n_answer_tokens;
    return [
      block("asked", prompt, answer, all, `turn ${number + 1}: tokens ${prompt} to ${answer} were asked`),
      block("answered", answer, at, all, `turn ${number + 1}: tokens ${answer} to ${at} were answered`),
    ];
  });
}

function axis(all) {
  const step = 10 ** Math.floor(Math.log10(all)) / (all / 10 ** Math.floor(Math.log10(all)) < 3 ? 2 : 1);
  const marks = [];
  for (let at = 0; at <= all; at += step) marks.push(svg("text", { x: `${100 * at / all}%`, y: 11, "text-anchor": at ? "middle" : "start" }, at.toLocaleString("en")));
  return make("div", { class: "place" }, make("span", { class: "label small" }, "token"), svg("svg", { class: "axis", height: 14, width: "100%", "aria-hidden": "true" }, ...marks), make("span", { class: "n" }));
}

export function placesPicture(turns, places) {
  const all = Math.max(1, places.n_tokens);
  const lanes = [lane("said", "", turnBlocks(turns, all), many(places.n_tokens, "token"))];
  for (const [node, n] of places.resident) {
    lanes.push(lane(node, colourOf(node), [block(`held ${colourOf(node)}`, 0, n, all, `${node} has rows 0 to ${n} in memory`)], `${Math.round(100 * n / all)} % in memory`));
  }
  for (const stored of places.stored) {
    const files = stored.files.map((file, i) => {
      const end = Math.min(file.end, stored.files[i + 1]?.start ?? stored.n_tokens);
      return block(`file ${i % 2 ? "odd" : ""}`, file.start, end, all, `${file.name}: rows ${file.start} to ${file.end}, ${bytes(file.n_bytes)}${file.used_at_ms ? `, used ${ago(file.used_at_ms)}` : ""}`);
    });
    lanes.push(lane("store", "", files, `${Math.round(100 * stored.n_tokens / all)} % in ${many(stored.files.length, "file")}`));
  }
  if (!places.resident.length) lanes.push(make("p", { class: "small" }, "No live node has rows of it in memory."));
  if (!places.stored.length) lanes.push(make("p", { class: "small" }, "The store has none of it: the next node would compute all."));
  return make("div", { class: "places" }, ...lanes, places.n_tokens ? axis(all) : null);
}
