"""Registries to open on a folder, and records to put into them."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np

from kvferry.coordinator.memory_registry import Ledger, MemoryRegistry
from kvferry.coordinator.registry import (
    FinishReason,
    Message,
    Picture,
    Registry,
    SessionRecord,
    TurnOutcome,
    TurnRecord,
)
from kvferry.coordinator.sqlite_registry import SqliteRegistry

Open = Callable[[], Awaitable[Registry]]


async def open_sqlite(folder: Path) -> Registry:
    return await SqliteRegistry(folder / "registry.sqlite3").open(new_coordinator_id="c1")


LEDGERS: dict[Path, Ledger] = {}


async def open_memory(folder: Path) -> Registry:
    """What it leaves behind stays as long as the test."""
    return await MemoryRegistry(LEDGERS.setdefault(folder, Ledger())).open("c1")


def session(session_id: str = "s", at_ms: int = 1) -> SessionRecord:
    return SessionRecord(
        session_id=session_id, model="m", tokenizer_digest="d", created_at_ms=at_ms, updated_at_ms=at_ms
    )


def turn(
    turn_id: str = "t1", *, session_id: str = "s", history: int = 0, prompt: tuple[int, ...] = (1, 2), at_ms: int = 5
) -> TurnRecord:
    return TurnRecord(
        session_id=session_id, turn_id=turn_id, messages=(Message("system", "be"), Message("user", "hé \0 'q\"")),
        n_history_tokens=history, prompt_ids=np.array(prompt, np.int32), sampling=b"\x00\xff", max_tokens=7,
        stop=("a", "\n"), digest="d", created_at_ms=at_ms,
    )  # fmt: skip


def outcome(
    answer: tuple[int, ...] = (3, 4), reason: FinishReason = FinishReason.END, **changes: object
) -> TurnOutcome:
    fields = {
        "reason": reason,
        "answer_ids": np.array(answer, np.int32),
        "answer_text": "ho €",
        "logprobs": b"\x01",
        "total_seconds": 1.25,
        "n_placements": 2,
    }
    return TurnOutcome(**{**fields, **changes})


async def finish(
    registry: Registry, turn_id: str = "t1", result: TurnOutcome | None = None, *, session_id: str = "s", at_ms: int = 9
) -> int:
    epoch = await registry.place_turn(session_id, turn_id, "fp")
    await registry.finish_turn(session_id, turn_id, epoch, result or outcome(), [b"p1", b"p2"], at_ms)
    return epoch


def plain(record: TurnRecord) -> dict[str, object]:
    """Comparable: arrays as lists."""
    fields = {**dataclasses.asdict(record), "prompt_ids": record.prompt_ids.tolist()}
    if record.outcome is not None:
        fields["outcome"] = {**dataclasses.asdict(record.outcome), "answer_ids": record.outcome.answer_ids.tolist()}
    return fields


def plain_outcome(result: TurnOutcome) -> dict[str, object]:
    return {**dataclasses.asdict(result), "answer_ids": result.answer_ids.tolist()}


def shown(turn_record: TurnRecord, *names: str) -> TurnRecord:
    pictures = tuple(
        Picture(content_hash=name, message=1, at=0, start=i, rows=2, cols=2, n_tokens=1, width=32, height=32, n_bytes=3)
        for i, name in enumerate(names)
    )
    return dataclasses.replace(turn_record, pictures=pictures)
