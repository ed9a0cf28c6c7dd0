"""What happens in a turn, as frozen values; the order in which they come is that of the coordinator's stream."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvferry.client.sdk.forms import ParsedAnswer, ToolCall


class FinishReason(StrEnum):
    """Why an answer ended."""

    END = "end"
    LENGTH = "length"
    STOP_STRING = "stop_string"
    CANCELLED = "cancelled"
    ERROR = "error"
    DEADLINE = "deadline"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token that could have been drawn."""

    token_id: int
    logprob: float
    text: str
    # What it stands for, maybe a part of a character, for which `text` has U+FFFD; empty from older coordinators.
    token_bytes: bytes = b""


@dataclass(frozen=True, slots=True)
class PrefixReport:
    """Where the rows of a turn's prompt came from; n_resident + n_restored + n_computed = n_tokens."""

    n_tokens: int
    n_resident: int
    n_restored: int
    n_computed: int
    queue_seconds: float
    restore_seconds: float
    prefill_seconds: float
    snapshot: str
    refused_snapshots: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node the router looked at, and why it was chosen or passed over."""

    node_id: str
    chosen: bool
    n_resident: int
    n_stored: int
    n_running: int
    n_queued: int
    reason: str
    # Parts of the predicted time to the first token; all 0 for a node that cannot take the turn.
    queue_seconds: float = 0.0
    restore_seconds: float = 0.0
    prefill_seconds: float = 0.0
    predicted_seconds: float = 0.0
    n_restored: int = 0
    n_computed: int = 0
    # By how much the turns that wait there would wait longer.
    others_seconds: float = 0.0
    # Another part of the predicted time: the vision tower's look at pictures.
    look_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Started:
    """The turn's record is durable."""

    n_prompt_tokens: int
    n_history_tokens: int


@dataclass(frozen=True, slots=True)
class Placed:
    """A node has the turn from answer token `first_index` on; `prefix` comes once the node has said what it found."""

    node_id: str
    epoch: int
    first_index: int
    candidates: tuple[Candidate, ...]
    prefix: PrefixReport | None
    # From the placement to its first new token, foreseen and as it came; 0 while there is none.
    predicted_seconds: float = 0.0
    first_token_seconds: float = 0.0
    n_candidates: int = 0


@dataclass(frozen=True, slots=True)
class Token:
    """One token of the answer. `sequence` is its index in the answer; `text` what it completed, maybe nothing."""

    sequence: int
    token_id: int
    text: str
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()
    # What the text completed of the answer's parts: marks, and the newlines beside them, are in `text` alone.
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    # With a log-probability: what the token itself stands for, maybe a part of a character.
    token_bytes: bytes = b""


@dataclass(frozen=True, slots=True)
class NodeLost:
    """The node that had the turn is gone; another one will be placed. `n_tokens` came before."""

    node_id: str
    cause: str
    detail: str
    n_tokens: int


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """Seen by the client only: the way to the coordinator broke after `n_tokens`; the SDK is asking again."""

    cause: str
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of every turn. `tail_text` is text that no token event carried."""

    reason: FinishReason
    n_prompt_tokens: int
    n_answer_tokens: int
    tail_text: str
    first_token_seconds: float
    total_seconds: float
    longest_pause_seconds: float
    n_placements: int
    error_code: str = ""
    error: str = ""
    answer: ParsedAnswer | None = None
    # What was held back of the answer's parts.
    tail_content: str = ""
    tail_reasoning: str = ""
    tail_calls: tuple[ToolCall, ...] = ()


TurnEvent = Started | Placed | Token | NodeLost | ConnectionLost | Finished
