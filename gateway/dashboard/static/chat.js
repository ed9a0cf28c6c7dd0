// A conversation, and the button that shows what all this is for.
import { byId, complaint, credentials, events, ferry, make, many, seconds } from "/assets/dom.js";
import { cluster, colourOf, killNode, on, turns } from "/assets/live.js";
import { drawWay } from "/assets/way.js";

const DEMO = "Write a long story about a ferry and its captain, with many details.";
const DEMO_KILL_AFTER = 40; // tokens: enough to see that it writes

let session = null, turnId = null, node = null, isSending = false;
let killAfter = 0;

function tell(text, kind) {
  const line = make("p", { class: kind }, text);
  byId("talk").append(line);
  line.scrollIntoView({ block: "nearest" });
  return line;
}

function mayKill(id) {
  node = id;
  byId("kill").disabled = !(id && cluster.can_kill);
  byId("kill").textContent = id ? `Kill ${id} now` : "Kill this node now";
}

// An answer grows in one element: a span for each node that wrote a part of it, a mark where one took over.
class Answer {
  constructor() {
    this.element = make("div", { class: "assistant", "aria-busy": "true" });
    this.text = make("span", {});
    this.element.append(this.text);
    byId("talk").append(this.element);
    this.lostAt = 0;
    this.n = 0;
  }

  writtenBy(id) {
    this.text = make("span", { class: `by ${colourOf(id)}`, "data-tip": `written by ${id}` });
    this.element.append(this.text);
  }

  lost(id, cause, n) {
    this.lostAt = performance.now();
    this.mark = make("span", { class: "mark lost", role: "note" }, `${id} died after ${many(n, "token")} (${cause}); looking for another node …`);
    this.element.append(this.mark);
    this.dead = id;
  }

  goesOn(id, index) {
    const pause = (performance.now() - this.lostAt) / 1000;
    const words = this.dead ? `${this.dead} died; ${id} goes on from token ${index} after ${seconds(pause)}` : `${id} goes on from token ${index}`;
    if (!this.mark) this.element.append(this.mark = make("span", {}));
    this.mark.className = "mark";
    this.mark.setAttribute("role", "note");
    this.mark.replaceChildren(ferry(), words);
    this.mark = this.dead = null;
    this.writtenBy(id);
  }

  end() {
    this.element.setAttribute("aria-busy", "false");
    this.mark?.replaceChildren("the answer ended before another node took over");
  }
}

function show(event, answer) {
  switch (event.kind) {
    case "session":
      session = event.session_id;
      turnId = event.turn_id;
      break;
    case "placed":
      mayKill(event.node_id);
      if (event.first_index || answer.dead) answer.goesOn(event.node_id, event.first_index);
      else answer.writtenBy(event.node_id);
      break;
    case "token":
      answer.text.append(event.text);
      answer.n = event.index + 1;
      if (killAfter && answer.n >= killAfter) {
        killAfter = 0;
        kill();
      }
      break;
    case "node_lost":
      mayKill(null);
      answer.lost(event.node_id, event.cause.replaceAll("_", " "), event.n_tokens);
      break;
    case "finished":
      answer.text.append(event.tail_text);
      tell(event.error || `${many(event.n_answer_tokens, "token")}, the first after ${seconds(event.first_token_seconds)}` +
        (event.n_placements > 1 ? `. ${many(event.n_placements, "node")}, the longest pause ${seconds(event.longest_pause_seconds)}: nothing lost, nothing twice.` : "."), event.error ? "news bad" : "news");
      break;
    default: tell(event.message ?? event.error?.message ?? "The stream ended with something unknown.", "news bad");
  }
}

async function send(text) {
  byId("talk").querySelector(".welcome")?.remove();
  tell(text, "user");
  const answer = new Answer();
  const headers = { "content-type": "application/json", ...credentials() };
  try {
    const response = await fetch("/dashboard/chat", { method: "POST", headers, body: JSON.stringify({ text, session_id: session }) });
    if (!response.ok) {
      answer.element.remove();
      if (response.status === 401 || response.status === 403) byId("access").open = true;
      tell((await response.json()).error.message, "news bad");
      return;
    }
    for await (const event of events(response)) {
      const atEnd = innerHeight + scrollY > document.body.scrollHeight - 160;
      show(event, answer);
      if (atEnd) scrollTo(0, document.body.scrollHeight);
    }
  } finally {
    answer.end();
  }
}

function mayAsk(is) {
  isSending = !is;
  for (const button of [byId("say").querySelector("[type=submit]"), byId("afresh")]) button.disabled = !is;
}

async function submit(text) {
  if (!text || isSending) return;
  mayAsk(false);
  try {
    await send(text);
  } catch (error) {
    tell(complaint(error), "news bad");
  } finally {
    mayAsk(true);
    killAfter = 0;
    mayKill(null);
  }
}

const kill = () => node && killNode(node).catch((error) => tell(complaint(error), "news bad"));

// What it is all for, without a further click.
export function showMe() {
  if (isSending) return;
  killAfter = DEMO_KILL_AFTER;
  submit(DEMO);
}

function welcome() {
  const examples = [DEMO, "Explain to a child how a harbour works, step by step.", "List twenty rivers and something about each."];
  byId("talk").replaceChildren(make("div", { class: "welcome" },
    make("p", {}, cluster.can_kill ? "Ask something that takes a long answer. While it is written, kill the node that writes it." : "Ask something: the answer outlives its node."),
    make("div", { class: "row" }, ...examples.map((text) => {
      const button = make("button", { type: "button" }, text);
      button.onclick = () => submit(text);
      return button;
    }))));
}

// The way of the answer that was asked for last, and the nodes that are there.
function showWay() {
  if (byId("chat").hidden) return;
  const turn = turns.get(`${session}/${turnId}`);
  const place = byId("way");
  if (!turn) {
    if (!place.querySelector(".empty")) place.replaceChildren(make("p", { class: "empty" }, "No answer yet."));
    return;
  }
  place.replaceChildren(...drawWay(turn, place.clientWidth - 26));
}

function showCrew(status) {
  byId("crew").replaceChildren(...status.nodes.map((one) => make("li", { class: `${colourOf(one.node_id)} ${one.state === "dead" ? "gone" : ""}` },
    make("span", { class: "dot", "aria-hidden": "true" }), make("span", { class: "name" }, one.node_id),
    make("span", { class: "what" }, one.node_id === node && isSending ? "writes this answer" : one.n_running && one.state === "live" ? `${one.n_running} running` : ""),
    make("span", { class: `state ${one.state}` }, one.state))));
  if (byId("talk").querySelector(".welcome") && status.can_kill !== welcome.could) {
    welcome.could = status.can_kill;
    welcome();
  }
}

export function startChat() {
  const words = byId("words");
  byId("say").onsubmit = (event) => {
    event.preventDefault();
    const text = words.value.trim();
    if (text && !isSending) {
      words.value = "";
      submit(text);
    }
  };
  words.onkeydown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId("say").requestSubmit();
    }
  };
  byId("kill").onclick = kill;
  byId("afresh").onclick = () => {
    session = turnId = null;
    welcome();
    words.focus();
  };
  welcome();
  on("cluster", showCrew);
  setInterval(showWay, 250);
}
