"""What the coordinator knows, and what it can be asked for, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypedDict

from kvferry.client.sdk.events import FinishReason, Placed


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation; role is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is drawn; what is None takes the default named in common.proto. Checked by the coordinator."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repetition_window: int | None = None
    seed: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


GREEDY = Sampling()


class SamplingFields(TypedDict, total=False):
    """The fields of Sampling as keyword arguments."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    repetition_window: int
    seed: int
    logprobs: bool
    top_logprobs: int


class TurnState(StrEnum):
    """Where a turn is."""

    UNKNOWN = "unknown"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class NodeState(StrEnum):
    """What the coordinator thinks of a node."""

    UNKNOWN = "unknown"
    LIVE = "live"
    SUSPECT = "suspect"
    DEAD = "dead"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A conversation. `n_tokens` and `n_turns` count finished turns; `open_turn_id` is empty when none is running."""

    session_id: str
    model: str
    created_at_ms: int
    updated_at_ms: int
    n_tokens: int
    n_turns: int
    epoch: int
    open_turn_id: str
    forked_from: str
    last_node_id: str


@dataclass(frozen=True, slots=True)
class TurnInfo:
    """One request and its answer."""

    turn_id: str
    state: TurnState
    messages: tuple[Message, ...]
    answer: str
    finish_reason: FinishReason
    n_prompt_tokens: int
    n_answer_tokens: int
    placements: tuple[Placed, ...]


@dataclass(frozen=True, slots=True)
class SessionDetails:
    """A session with its turns and the tokens of the finished ones."""

    session: SessionInfo
    turns: tuple[TurnInfo, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node as the coordinator sees it."""

    node_id: str
    address: str
    state: NodeState
    model: str
    fingerprint: str
    n_running: int
    n_queued: int
    n_resident_sessions: int
    kv_bytes_used: int
    kv_bytes_budget: int
    seconds_since_heartbeat: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    kernel_path: str
    store_ok: bool
    n_threads: int
    tokens_generated: int
    # It saves to another store than the coordinator looks at.
    other_store: bool
    pid: int


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The coordinator and its fleet at a glance."""

    version: str
    model: str
    coordinator_id: str
    generation: int
    uptime_seconds: float
    n_sessions: int
    n_open_turns: int
    nodes: tuple[NodeInfo, ...]
    n_snapshots: int
    snapshot_bytes: int
    n_failovers: int
    n_turns_finished: int
    # Of the latest placements: how many, the median relative error of the predicted time to first token, and the
    # medians of what was predicted and of what came.
    n_predictions: int = 0
    prediction_error: float = 0.0
    predicted_seconds: float = 0.0
    first_token_seconds: float = 0.0
