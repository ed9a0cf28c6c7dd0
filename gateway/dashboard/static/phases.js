// A turn's life in phases. Pure: what a picture draws, and the words for those who cannot see it.
import { many, seconds } from "/assets/dom.js";

export const KINDS = ["wait", "reuse", "restore", "prefill", "decode", "pause"];

// [{kind, from, to, node, text}], milliseconds since 1970, in order.
export function phasesOf(turn, now) {
  const found = [];
  const add = (kind, from, to, node, text) => { if (to > from || kind === "reuse") found.push({ kind, from, to: Math.max(from, to), node, text }); };
  let last = turn.began_ms;
  let lost = null;
  for (const stay of turn.stays) {
    const node = stay.node_id;
    if (lost) add("pause", last, stay.placed_ms, node, `paused ${seconds((stay.placed_ms - last) / 1000)}: ${lost.node_id} was lost (${lost.lost}), ${node} takes over`);
    else add("wait", last, stay.placed_ms, node, "waits for a node");
    let at = stay.placed_ms;
    if (stay.n_resident) add("reuse", at, at, node, `${node} has ${many(stay.n_resident, "row")} of the prompt in memory`);
    for (const [kind, ms, text] of [
      ["wait", stay.queue_ms, `waits on ${node} ${seconds(stay.queue_ms / 1000)}`],
      ["restore", stay.restore_ms, stay.n_restored ? `${node} restores ${many(stay.n_restored, "row")} from the store in ${seconds(stay.restore_ms / 1000)}` : `${node} asks the store in vain, ${seconds(stay.restore_ms / 1000)}`],
      ["prefill", stay.prefill_ms, `${node} computes ${many(stay.n_computed, "row")} in ${seconds(stay.prefill_ms / 1000)}`],
    ]) {
      add(kind, at, at + ms, node, text);
      at += ms;
    }
    const running = !turn.ended_ms && !stay.lost;
    const until = running ? now : stay.last_token_ms || at;
    const began = stay.first_token_ms || at;
    const rate = until > began && stay.n_tokens > 1 ? `, ${((stay.n_tokens - 1) / ((until - began) / 1000)).toFixed(0)} a second` : "";
    add("decode", began, until, node, `${node} decodes ${many(stay.n_tokens, "token")}${rate}`);
    last = Math.max(until, began);
    lost = stay.lost ? stay : null;
  }
  if (lost && !turn.ended_ms) add("pause", last, now, lost.node_id, `paused: ${lost.node_id} was lost (${lost.lost}), no node has it yet`);
  if (!turn.stays.length && !turn.ended_ms) add("wait", last, now, "", "waits for a node");
  return found;
}

export const nodesOf = (turn) => turn.stays.map((stay) => stay.node_id);

export function inWords(turn, now) {
  const where = nodesOf(turn).join(", then ") || "no node yet";
  const how = turn.ended_ms ? `ended (${turn.reason})` : "running";
  return `Turn on ${where}; ${how}; ${many(turn.n_tokens, "token")}. ${phasesOf(turn, now).map((phase) => phase.text).join("; ")}.`;
}
