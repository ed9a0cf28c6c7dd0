// A conversation, and the button that shows what all this is for.
import { byId, cluster, killNode, make } from "/assets/app.js";

let session = null;
let node = null;

function tell(text, kind = "news") {
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

// Each event of a stream that a POST is answered with.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
  }
}

// `answer.line` is where the text grows: a new one behind each piece of news, so that all stands in the order it came.
function show(event, answer) {
  switch (event.kind) {
    case "session": session = event.session_id; break;
    case "placed":
      mayKill(event.node_id);
      if (event.first_index) {
        tell(`${event.node_id} goes on from token ${event.first_index}.`);
        answer.line = tell("", "assistant");
      }
      break;
    case "token": answer.line.textContent += event.text; break;
    case "node_lost":
      mayKill(null);
      tell(`${event.node_id} is gone (${event.cause}) after ${event.n_tokens} tokens.`, "news bad");
      break;
    case "finished":
      answer.line.textContent += event.tail_text;
      tell(event.error || `${event.n_answer_tokens} tokens, first after ${event.first_token_seconds.toFixed(2)} s` +
        (event.n_placements > 1 ? `, ${event.n_placements} nodes, longest pause ${event.longest_pause_seconds.toFixed(2)} s, nothing lost.` : "."),
        event.error ? "news bad" : "news");
      break;
    case "error": case undefined: tell(event.message ?? event.error?.message, "news bad"); break;
  }
}

async function send(text) {
  tell(text, "user");
  const answer = { line: tell("", "assistant") };
  const response = await fetch("/dashboard/chat", { method: "POST", body: JSON.stringify({ text, session_id: session }) });
  if (!response.ok) {
    tell((await response.json()).error.message, "news bad");
    return;
  }
  for await (const event of events(response)) {
    show(event, answer);
    answer.line.scrollIntoView({ block: "end" });
  }
}

export function startChat() {
  const form = byId("say");
  form.onsubmit = async (event) => {
    event.preventDefault();
    const words = byId("words").value.trim();
    if (!words) return;
    byId("words").value = "";
    const button = form.querySelector("[type=submit]");
    button.disabled = true;
    try {
      await send(words);
    } catch (error) {
      tell(error.message, "news bad");
    } finally {
      button.disabled = false;
      mayKill(null);
    }
  };
  byId("words").onkeydown = (event) => {
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      form.requestSubmit();
    }
  };
  byId("kill").onclick = () => killNode(node).catch((error) => tell(error.message, "news bad"));
  byId("afresh").onclick = () => {
    session = null;
    byId("talk").replaceChildren();
  };
}
