"""What happened in a drill, in one list ordered by time; and as a picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Final

from kvferry.client.sdk import ConnectionLost, Finished, NodeLost, Placed, Token, TurnEvent
from kvferry.drills.runner import Outcome
from kvferry.drills.stage import Conversation

PAUSE_S: Final = 0.5
"""A wait for a token that is worth a line of its own."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Seconds since the disturbed conversations began; `kind` is one word, `part` a node, a conversation, ..."""

    at_s: float
    kind: str
    part: str
    text: str


def timeline_of(outcome: Outcome) -> list[Moment]:
    """Everything that the drill did and that was seen, save for tokens."""
    began = outcome.began_at
    moments = []
    for strike in outcome.strikes:
        part = ", ".join(strike.parts)
        moments.append(Moment(strike.at - began, "strike", part, f"{strike.what.value} by {strike.how}"))
        if strike.healed_at is not None:
            moments.append(Moment(strike.healed_at - began, "heal", part, f"{strike.what.value} undone"))
    for sight in outcome.sights:
        store = "" if sight.store_ok else ", its store does not answer"
        moments.append(Moment(sight.at - began, "node", sight.node_id, f"{sight.state.value}{store}"))
    for conversation in outcome.conversations:
        who = f"conversation {conversation.number + 1}"
        for heard in conversation.heard:
            told = _told(heard.event, heard.turn)
            if told is not None:
                moments.append(Moment(heard.at - began, told[0], who, told[1]))
        moments += [
            Moment(since - began, "pause", who, f"no token for {to - since:.2f} s")
            for since, to in conversation.waits
            if to - since >= PAUSE_S
        ]
        if conversation.error and conversation.heard:
            moments.append(Moment(conversation.heard[-1].at - began, "failed", who, conversation.error))
    return sorted(moments, key=lambda moment: moment.at_s)


def _told(event: TurnEvent | None, turn: int) -> tuple[str, str] | None:
    match event:
        case None:
            return "asked", f"question {turn}"
        case Placed():
            return "placed", f"answer {turn}: {event.node_id} has it from token {event.first_index} on"
        case NodeLost():
            return "lost", f"answer {turn}: {event.node_id} lost after {event.n_tokens} tokens: {event.cause}"
        case ConnectionLost():
            return "lost", f"answer {turn}: coordinator lost after {event.n_tokens} tokens"
        case Finished():
            return "finished", f"answer {turn}: {event.n_answer_tokens} tokens ({event.reason.value})"
        case _:
            return None


WIDTH: Final = 960
LEFT: Final = 120
LANE: Final = 26
COLOURS: Final = ("#3b7dd8", "#d8803b", "#4aa564", "#9a5fc2", "#b8a12f", "#3ba7a7", "#c25f86", "#7a7a7a")


def picture_of(outcome: Outcome) -> str:
    """Inline SVG: a lane for each conversation (a tick for each token, in its node's colour) and each node (grey where
    it was not live), red bands while something was disturbed."""
    began = outcome.began_at
    end = max([1.0, *(moment.at_s for moment in timeline_of(outcome))])
    scale = (WIDTH - LEFT - 10) / end
    node_ids = sorted({sight.node_id for sight in outcome.sights} | _servers(outcome.conversations))
    colour = {node_id: COLOURS[number % len(COLOURS)] for number, node_id in enumerate(node_ids)}
    lanes = len(outcome.conversations) + len(node_ids)
    height = LANE * (lanes + 2)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            f'role="img" font-family="sans-serif" font-size="11"><title>{escape(outcome.scenario.name)}</title>'
        )
    ]

    def x(at: float) -> float:
        return round(LEFT + max(0.0, at - began) * scale, 1)

    for strike in outcome.strikes:
        left, right = x(strike.at), x(strike.healed_at if strike.healed_at is not None else began + end)
        parts.append(
            f'<rect x="{left}" y="{LANE}" width="{max(2.0, right - left):.1f}" height="{LANE * lanes}" fill="#c0392b" '
            f'fill-opacity="0.13"/><text x="{left + 2}" y="{LANE - 8}" fill="#c0392b">{strike.what.value}</text>'
        )
    for row, conversation in enumerate(outcome.conversations):
        parts += _conversation_lane(conversation, LANE * (row + 1), x, colour)
    for row, node_id in enumerate(node_ids, start=len(outcome.conversations)):
        parts += _node_lane(outcome, node_id, LANE * (row + 1), x, colour[node_id], end)
    step = next(step for step in (1, 2, 5, 10, 20, 60, 600) if end / step <= 16)
    for second in range(0, int(end) + 1, step):
        at = LEFT + second * scale
        parts.append(
            f'<line x1="{at:.1f}" y1="{LANE}" x2="{at:.1f}" y2="{LANE * (lanes + 1)}" stroke="#888" '
            f'stroke-opacity="0.25"/><text x="{at:.1f}" y="{height - 10}" fill="#666">{second} s</text>'
        )
    return "".join([*parts, "</svg>"])


def _servers(conversations: list[Conversation]) -> set[str]:
    placed = (placed for c in conversations for log in c.logs.values() for placed in log.placements)
    return {p.node_id for p in placed}


def _conversation_lane(
    conversation: Conversation, y: int, x: Callable[[float], float], colour: dict[str, str]
) -> list[str]:
    parts = [f'<text x="4" y="{y + 17}" fill="currentColor">conversation {conversation.number + 1}</text>']
    node_id = ""
    for heard in conversation.heard:
        match heard.event:
            case Placed():
                node_id = heard.event.node_id
            case Token():
                at = x(heard.at)
                parts.append(f'<path d="M{at} {y + 5}v16" stroke="{colour.get(node_id, "#7a7a7a")}"/>')
            case NodeLost() | ConnectionLost():
                at = x(heard.at)
                parts.append(f'<path d="M{at - 4} {y + 9}l8 8m0 -8l-8 8" stroke="#c0392b" stroke-width="2"/>')
            case _:
                pass
    return parts


def _node_lane(
    outcome: Outcome, node_id: str, y: int, x: Callable[[float], float], colour: str, end: float
) -> list[str]:
    parts = [f'<text x="4" y="{y + 17}" fill="currentColor">{escape(node_id)}</text>']
    sights = [sight for sight in outcome.sights if sight.node_id == node_id]
    for sight, following in zip(sights, [*sights[1:], None], strict=True):
        left = x(sight.at)
        right = x(following.at if following is not None else outcome.began_at + end)
        fill = colour if sight.is_well else "#999999"
        label = f"{sight.state.value}{'' if sight.store_ok else ', store silent'}"
        parts.append(
            f'<rect x="{left}" y="{y + 8}" width="{max(1.0, right - left):.1f}" height="10" fill="{fill}">'
            f"<title>{escape(label)}</title></rect>"
        )
    return parts
