// A node as a card: what it does, how full and how warm it is, and its last minutes as a line.
import { bytes, make, many, svg } from "/assets/dom.js";
import { colourOf } from "/assets/live.js";

const MINUTES_MS = 300_000;
const HOT = 80; // degrees from which boards throttle, or soon will

// [at, tokens/s, K/V part, degrees] of the last five minutes as an area.
function sparkline(samples, now) {
  const width = 240, height = 36;
  const top = Math.max(1, ...samples.map(([, rate]) => rate));
  const points = samples.filter(([at]) => now - at < MINUTES_MS)
    .map(([at, rate]) => `${(width * (1 - (now - at) / MINUTES_MS)).toFixed(1)},${(height - 2 - (height - 4) * rate / top).toFixed(1)}`);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", class: "spark", role: "img",
    "aria-label": `Tokens a second in the last five minutes: ${top.toFixed(0)} at most`, "data-tip": `tokens a second, the last five minutes; ${top.toFixed(0)} at most` });
  if (points.length > 1) {
    const [first, last] = [points[0], points.at(-1)].map((point) => point.split(",")[0]);
    picture.append(svg("polygon", { points: `${first},${height} ${points.join(" ")} ${last},${height}` }), svg("polyline", { points: points.join(" ") }));
  }
  return picture;
}

function gauge(label, part, text) {
  const bar = make("div", { class: "bar", role: "meter", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round(part * 100), "aria-valuetext": text }, make("i"));
  bar.firstChild.style.width = `${Math.min(100, part * 100).toFixed(1)}%`;
  if (part > 0.9) bar.classList.add("full");
  return bar;
}

const fact = (name, value, kind) => make("div", { class: kind }, make("dt", {}, name), make("dd", {}, value));

function troubles(node) {
  const found = [];
  if (!node.store_ok) found.push("its store is away");
  if (node.other_store) found.push("it saves to another store");
  if (node.other_key) found.push("it has another store key");
  if (node.store?.blocks_wrong) found.push(`${many(node.store.blocks_wrong, "restored block")} had wrong bits`);
  if (node.store?.files_refused) found.push(`${many(node.store.files_refused, "file")} refused`);
  return found;
}

export function nodeCard(onKill) {
  const body = make("div");
  const button = make("button", { class: "danger small", type: "button" }, "Kill");
  const element = make("article", { class: "card" }, body, button);
  return {
    element,
    update(node, status) {
      const samples = status.history.get(node.node_id) ?? [];
      const [, rate, , degrees] = samples.at(-1) ?? [0, 0, 0, null];
      const gone = node.state === "dead";
      element.className = `card ${colourOf(node.node_id)} ${gone ? "gone" : ""}`;
      button.hidden = !(status.can_kill && node.state === "live");
      button.setAttribute("aria-label", `Kill ${node.node_id}`);
      button.onclick = () => onKill(node.node_id);
      const used = node.kv_bytes_used / Math.max(node.kv_bytes_budget, 1);
      const memory = `${bytes(node.kv_bytes_used)} of ${bytes(node.kv_bytes_budget)}`;
      body.replaceChildren(
        make("h3", {}, make("span", { class: "dot", "aria-hidden": "true" }), make("span", { class: "name" }, node.node_id), make("span", { class: `state ${node.state}` }, node.state)),
        make("p", { class: "big" }, make("b", {}, gone ? "–" : rate.toFixed(0)), " tokens/s",
          make("span", { class: "beside" }, gone ? `silent for ${Math.round(node.seconds_since_heartbeat)} s` : `${node.n_running} running, ${node.n_queued} waiting`)),
        sparkline(samples, Date.now()),
        make("p", { class: "measure" }, make("span", {}, "K/V memory"), make("span", {}, memory)),
        gauge("K/V memory in use", used, memory),
        make("dl", { class: "facts" },
          fact("prefill", `${node.prefill_tokens_per_second.toFixed(0)} t/s`), fact("decode", `${node.decode_tokens_per_second.toFixed(0)} t/s`),
          fact("restore", node.restore_bytes_per_second ? `${(node.restore_bytes_per_second / 2 ** 20).toFixed(0)} MiB/s` : "–"),
          degrees === null ? fact("sessions", String(node.n_resident_sessions)) : fact("hottest zone", `${degrees.toFixed(0)} °C`, degrees >= HOT ? "hot" : "")),
        make("p", { class: "small" }, `${node.kernel_path}, ${many(node.n_threads, "thread")}${degrees === null ? "" : `, ${many(node.n_resident_sessions, "session")} in memory`}`),
        ...troubles(node).map((text) => make("p", { class: "trouble" }, text)),
      );
    },
  };
}
