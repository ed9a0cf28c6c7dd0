"""Between the wire's messages and our own values. Everything that comes in is bounded here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.config import VisionConfig
from kvferry.engine.errors import ContextExceeded
from kvferry.engine.sampling_settings import SamplingSettings
from kvferry.engine.vision.placed import Images, PlacedImage
from kvferry.engine.vision.positions import Grid
from kvferry.node.errors import InvalidRequest, NoVision
from kvferry.node.load import NodeView, Totals
from kvferry.node.messages import Published, StoreNews
from kvferry.node.turns import Finished, Prefix, Token
from kvferry.proto.v1 import common_pb2, worker_pb2
from kvferry.store.statistics import StoreStatistics
from kvferry.telemetry.loop_lag import LagSummary

MAX_NAME_BYTES: Final = 256
MAX_PRIORITY: Final = 100
"""Either way from 0: more than enough classes, and none can be put beyond all others by a careless client."""

HASH_BYTES: Final = 32
"""Of a SHA-256."""

MAX_END_TOKENS: Final = 1024
"""Far more than any model has; checked since the set is looked at for every token."""

FINISH_REASON: Final = {
    "end": common_pb2.FINISH_REASON_END,
    "length": common_pb2.FINISH_REASON_LENGTH,
    "cancelled": common_pb2.FINISH_REASON_CANCELLED,
}


def parse_name(field: str, value: str) -> str:
    """A session or turn id."""
    if not 1 <= len(value.encode()) <= MAX_NAME_BYTES:
        raise InvalidRequest(f"{field} must have 1 to {MAX_NAME_BYTES} bytes")
    return value


def parse_namespace(value: str) -> str:
    """A tenant's name, or nothing."""
    return value and parse_name("namespace", value)


def parse_tokens(token_ids: Sequence[int], vocab_size: int, context_length: int) -> NDArray[np.int32]:
    """Token ids as int32 [n], 1 <= n <= context_length."""
    n_tokens = len(token_ids)
    if n_tokens == 0:
        raise InvalidRequest("token_ids is empty; a turn needs at least one token")
    if n_tokens > context_length:
        raise ContextExceeded(f"{n_tokens} tokens do not fit the context of {context_length}; shorten the conversation")
    tokens = np.fromiter(token_ids, dtype=np.int32, count=n_tokens)
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise InvalidRequest(f"token id {wrong} lies outside the vocabulary, [0, {vocab_size})")
    return tokens


def parse_counts(request: worker_pb2.RunTurnRequest, context_length: int) -> None:
    """The counts of a turn, against each other and the context."""
    n_tokens, n_prompt_tokens, n_ends = len(request.token_ids), request.n_prompt_tokens, len(request.end_token_ids)
    if not 1 <= n_prompt_tokens <= n_tokens:
        raise InvalidRequest(f"n_prompt_tokens is {n_prompt_tokens}, it must lie in [1, {n_tokens}]")
    if n_prompt_tokens >= context_length:
        raise ContextExceeded(
            f"a prompt of {n_prompt_tokens} tokens leaves no room for an answer in the context of {context_length}"
        )
    if request.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1")
    if n_ends > MAX_END_TOKENS:
        raise InvalidRequest(f"there are {n_ends} end_token_ids, at most {MAX_END_TOKENS} are allowed")
    if abs(request.priority) > MAX_PRIORITY:
        raise InvalidRequest(f"priority is {request.priority}, it must lie in [-{MAX_PRIORITY}, {MAX_PRIORITY}]")


def parse_images(
    messages: Sequence[worker_pb2.PromptImage], prompt_ids: NDArray[np.int32], vision: VisionConfig | None
) -> tuple[Images, dict[bytes, bytes]]:
    """Images that stand in a prompt, int32 [n], and their pixels (PNG files) by content hash, of those that have any.

    Raises NoVision, InvalidRequest.
    """
    if not messages:
        return (), {}
    if vision is None:
        raise NoVision("this node's model has no vision tower, so it takes no images; send the turn to another one")
    images: list[PlacedImage] = []
    for number, message in enumerate(messages, start=1):
        grid = Grid(1, message.grid_rows, message.grid_cols)
        n_tokens = grid.n_tokens(vision.merge_size)
        image = PlacedImage(message.start, n_tokens, grid, message.content_hash)
        if len(image.content_hash) != HASH_BYTES:
            raise InvalidRequest(
                f"image {number} has a content_hash of {len(image.content_hash)} bytes, not {HASH_BYTES}"
            )
        if min(grid.rows, grid.cols) < 1 or grid.rows % vision.merge_size or grid.cols % vision.merge_size:
            raise InvalidRequest(
                f"image {number} has {grid.rows} x {grid.cols} patches, not multiples of {vision.merge_size}"
            )
        free_from = images[-1].end if images else 0
        places = prompt_ids[image.start : image.end]
        if image.start < free_from or len(places) < n_tokens or (places != vision.image_token_id).any():
            raise InvalidRequest(
                f"image {number} should stand at tokens {image.start} to {image.end - 1}; these are not image tokens"
            )
        images.append(image)
    return tuple(images), {message.content_hash: message.pixels for message in messages if message.pixels}


def parse_sampling(message: common_pb2.SamplingSettings) -> SamplingSettings:
    """Absent fields take the defaults of SamplingSettings; raises InvalidSampling."""
    given = {field.name: value for field, value in message.ListFields()}
    return SamplingSettings(**given).validate()


def prefix_message(prefix: Prefix) -> common_pb2.PrefixReport:
    """As it travels."""
    return common_pb2.PrefixReport(
        n_tokens=prefix.n_tokens,
        n_resident=prefix.n_resident,
        n_restored=prefix.n_restored,
        n_computed=prefix.n_computed,
        queue_seconds=prefix.queue_seconds,
        restore_seconds=prefix.restore_seconds,
        prefill_seconds=prefix.prefill_seconds,
        look_seconds=prefix.look_seconds,
        n_looked=prefix.n_looked,
        snapshot=prefix.snapshot,
        refused_snapshots=prefix.refused_snapshots,
    )


def run_messages(events: Sequence[Prefix | Token | Finished]) -> list[worker_pb2.RunTurnResponse]:
    """Events in order; tokens that wait together travel together."""
    messages: list[worker_pb2.RunTurnResponse] = []
    for event in events:
        match event:
            case Prefix():
                messages.append(worker_pb2.RunTurnResponse(prefix=prefix_message(event)))
            case Token():
                if not messages or messages[-1].WhichOneof("event") != "tokens":
                    messages.append(worker_pb2.RunTurnResponse(tokens=worker_pb2.GeneratedTokens()))
                messages[-1].tokens.tokens.append(_token_message(event))
            case Finished():
                finished = worker_pb2.RunFinished(reason=FINISH_REASON[event.reason])
                messages.append(worker_pb2.RunTurnResponse(finished=finished))
    return messages


def _token_message(token: Token) -> common_pb2.GeneratedToken:
    return common_pb2.GeneratedToken(
        index=token.index,
        token_id=token.sampled.token_id,
        logprob=token.sampled.logprob,
        top_logprobs=[common_pb2.TokenLogprob(token_id=i, logprob=p) for i, p in token.sampled.top],
    )


def snapshot_message(published: Published, fingerprint: str) -> worker_pb2.SnapshotInfo:
    """As it travels."""
    return worker_pb2.SnapshotInfo(
        name=published.name,
        fingerprint=fingerprint,
        n_tokens=published.n_tokens,
        n_bytes=published.n_bytes,
        seconds=published.seconds,
        namespace=published.namespace,
    )


def resident_messages(view: NodeView) -> list[worker_pb2.ResidentSession]:
    """As they travel."""
    return [worker_pb2.ResidentSession(session_id=name, n_tokens=n_rows) for name, n_rows in view.resident]


def process_message(lag: LagSummary, n_tasks: int, n_open_turns: int) -> worker_pb2.ProcessHealth:
    """How the process fares, as it travels."""
    return worker_pb2.ProcessHealth(
        loop_lag_p50_seconds=lag.p50,
        loop_lag_p99_seconds=lag.p99,
        loop_lag_max_seconds=lag.largest,
        n_loop_lag_samples=lag.n_samples,
        n_tasks=n_tasks,
        n_open_turns=n_open_turns,
    )


def store_message(statistics: StoreStatistics | None, totals: Totals) -> common_pb2.StoreFigures | None:
    """What a node's store has done; None without one."""
    if statistics is None:
        return None
    return common_pb2.StoreFigures(
        bytes_saved=statistics.bytes_written,
        bytes_restored=statistics.bytes_read,
        saves_without_room=statistics.n_without_room,
        saves_over_write_budget=statistics.n_over_write_budget,
        saves_not_worth_it=totals.saves_not_worth_it,
        write_budget_left=statistics.write_budget_left,
        files_evicted=statistics.n_evicted,
        files_refused=statistics.n_refusals,
        files_quarantined=statistics.n_quarantined,
        blocks_audited=totals.blocks_audited,
        blocks_wrong=totals.blocks_wrong,
    )


def load_message(
    view: NodeView, totals: Totals, store: StoreNews, now: float, temperature: float | None = None
) -> worker_pb2.NodeLoad:
    """What a node tells about its work; `now` in monotonic seconds, `temperature` of its board in Celsius."""
    return worker_pb2.NodeLoad(
        n_running=view.n_running,
        n_queued=view.n_queued,
        kv_bytes_used=view.kv_bytes_used,
        kv_bytes_budget=view.kv_bytes_budget,
        rows_prefilled=totals.rows_prefilled,
        tokens_generated=totals.tokens_generated,
        tokens_proposed=totals.tokens_proposed,
        tokens_accepted=totals.tokens_accepted,
        engine_steps=totals.engine_steps,
        stalled_seconds=view.stalled_seconds(now),
        stall_limit_seconds=view.stall_limit_seconds,
        prefill_tokens_per_second=totals.prefill_rate.per_second,
        decode_tokens_per_second=totals.decode_rate.per_second,
        restore_bytes_per_second=totals.restore_rate.per_second,
        store_ok=not store.error,
        store_error=store.error,
        snapshots_published=totals.snapshots_published,
        snapshots_failed=totals.snapshots_failed,
        snapshots_refused=totals.snapshots_refused,
        blocks_audited=totals.blocks_audited,
        blocks_wrong=totals.blocks_wrong,
        store_id=store.store_id,
        store_seal=store.seal,
        prompts_covered=totals.prompts_covered,
        store=store_message(store.statistics, totals),
        temperature_celsius=temperature,
    )
