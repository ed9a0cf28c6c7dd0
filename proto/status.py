"""Error codes and the one gRPC status each of them maps to; used by both ends of every call.

An error travels as its status, its sentence, and two trailing metadata entries: ``kvferry-code`` (stable, for
programs) and, where trying again can help, ``retry-after-ms``.
"""

from __future__ import annotations

from typing import Final

import grpc

CODE_KEY: Final = "kvferry-code"
RETRY_AFTER_KEY: Final = "retry-after-ms"

STATUS_OF: Final[dict[str, grpc.StatusCode]] = {
    # the caller asked for something that cannot be
    "empty_prompt": grpc.StatusCode.INVALID_ARGUMENT,
    "images_too_large": grpc.StatusCode.INVALID_ARGUMENT,
    "invalid_import": grpc.StatusCode.INVALID_ARGUMENT,
    "invalid_image": grpc.StatusCode.INVALID_ARGUMENT,
    "invalid_message": grpc.StatusCode.INVALID_ARGUMENT,
    "invalid_name": grpc.StatusCode.INVALID_ARGUMENT,
    "invalid_sampling": grpc.StatusCode.INVALID_ARGUMENT,
    "invalid_request": grpc.StatusCode.INVALID_ARGUMENT,
    "invalid_tools": grpc.StatusCode.INVALID_ARGUMENT,
    "invalid_format": grpc.StatusCode.INVALID_ARGUMENT,
    "format_too_complex": grpc.StatusCode.INVALID_ARGUMENT,
    "no_vision": grpc.StatusCode.INVALID_ARGUMENT,
    "prompt_too_long": grpc.StatusCode.INVALID_ARGUMENT,
    "index_out_of_range": grpc.StatusCode.OUT_OF_RANGE,
    # the caller named something that is not there, or is there already
    "unknown_model": grpc.StatusCode.NOT_FOUND,
    "unknown_session": grpc.StatusCode.NOT_FOUND,
    "unknown_turn": grpc.StatusCode.NOT_FOUND,
    "session_exists": grpc.StatusCode.ALREADY_EXISTS,
    "turn_exists": grpc.StatusCode.ALREADY_EXISTS,
    # not in this state
    "session_busy": grpc.StatusCode.FAILED_PRECONDITION,
    "model_mismatch": grpc.StatusCode.FAILED_PRECONDITION,
    "stale_epoch": grpc.StatusCode.FAILED_PRECONDITION,
    "node_id_taken": grpc.StatusCode.FAILED_PRECONDITION,
    "stale_coordinator": grpc.StatusCode.FAILED_PRECONDITION,
    # not now
    "no_node": grpc.StatusCode.UNAVAILABLE,
    "draining": grpc.StatusCode.UNAVAILABLE,
    "lease_lost": grpc.StatusCode.UNAVAILABLE,
    "starting": grpc.StatusCode.UNAVAILABLE,
    "turn_elsewhere": grpc.StatusCode.UNAVAILABLE,
    "queue_full": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "out_of_kv_memory": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "slow_client": grpc.StatusCode.RESOURCE_EXHAUSTED,
    # not for this caller
    "unauthenticated": grpc.StatusCode.UNAUTHENTICATED,
    "permission_denied": grpc.StatusCode.PERMISSION_DENIED,
    "rate_limited": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "too_many_turns": grpc.StatusCode.RESOURCE_EXHAUSTED,
    # ours
    "registry_unavailable": grpc.StatusCode.UNAVAILABLE,
    "store_unavailable": grpc.StatusCode.UNAVAILABLE,
    "store_full": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "snapshot_gone": grpc.StatusCode.NOT_FOUND,
    "snapshot_rejected": grpc.StatusCode.DATA_LOSS,
    "name_taken": grpc.StatusCode.ALREADY_EXISTS,
    "placements_exhausted": grpc.StatusCode.UNAVAILABLE,
    "internal": grpc.StatusCode.INTERNAL,
}


def status_of(code: str) -> grpc.StatusCode:
    """The gRPC status of an error code; INTERNAL for one that is not in the table."""
    return STATUS_OF.get(code, grpc.StatusCode.INTERNAL)


def trailing_metadata(code: str, retry_after_ms: int | None = None) -> tuple[tuple[str, str], ...]:
    """The trailing metadata that goes with an error."""
    entries = [(CODE_KEY, code)]
    if retry_after_ms is not None:
        entries.append((RETRY_AFTER_KEY, str(retry_after_ms)))
    return tuple(entries)
