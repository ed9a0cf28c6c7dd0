"""Records as bytes: compressed JSON that names the dataclasses in it, so that a new field needs nothing here.

A field that a record lacks takes its default: what an older program wrote can be read by a newer one.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import zlib
from collections.abc import Callable
from typing import Any, Final, TypeVar

import numpy as np

from kvferry.coordinator.errors import RegistryUnavailable
from kvferry.coordinator.registry import (
    AnswerForm,
    FinishReason,
    Message,
    Picture,
    SessionRecord,
    TurnOutcome,
    TurnRecord,
)
from kvferry.engine.text.messages import Tool, ToolCall

R = TypeVar("R")

LAYOUT: Final = 1
"""Of the keys and records; raised when an older program could not read them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MetaRecord:
    """What is the same for all coordinators of a registry."""

    coordinator_id: str
    generation: int
    layout: int = LAYOUT


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorRecord:
    """A coordinator that lives. ``address`` is empty until it serves."""

    address: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredSession:
    """A session, and where its turns lie."""

    record: SessionRecord
    place: str
    # Of all its turns, failed ones included: the position of the next.
    n_begun: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpenTurn:
    """What changes while a turn is answered."""

    turn_id: str
    position: int
    # Of its prompt.
    n_new_tokens: int
    # The instance of the coordinator that answers it.
    owner: str
    epoch: int = 0
    fingerprint: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredAnswer:
    """How a turn ended, under which epoch, and where it had been."""

    outcome: TurnOutcome
    epoch: int
    fingerprint: str
    placements: tuple[bytes, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlobReference:
    """Where a value lies that lies in pieces."""

    blob_id: str
    n_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PixelsRecord:
    """A picture's PNG file."""

    blob: BlobReference


KINDS: Final[dict[str, Callable[..., object]]] = {
    kind.__name__: kind
    for kind in (
        *(AnswerForm, Message, Picture, SessionRecord, Tool, ToolCall, TurnOutcome, TurnRecord),
        *(BlobReference, CoordinatorRecord, MetaRecord, OpenTurn, PixelsRecord, StoredAnswer, StoredSession),
    )
}


SPOKEN: Final[tuple[tuple[type, str, Callable[[Any], object]], ...]] = (
    (np.ndarray, "tokens", lambda ids: base64.b64encode(ids.astype("<i4").tobytes()).decode()),
    (bytes, "bytes", lambda value: base64.b64encode(value).decode()),
    (FinishReason, "reason", int),
    # a model's, in which anything may stand
    (dict, "json", lambda value: json.dumps(value, ensure_ascii=False)),
)
"""What is not JSON's own, and how it is said there."""


def pack(record: object) -> bytes:
    """Any record of ``KINDS``."""
    return zlib.compress(json.dumps(_plain(record), ensure_ascii=False, separators=(",", ":")).encode(), 1)


def unpack(kind: type[R], packed: bytes) -> R:
    """What ``pack`` was given. Raises RegistryUnavailable for what is no such record."""
    try:
        record = json.loads(zlib.decompress(packed), object_hook=_record)
    except (ValueError, KeyError, TypeError, zlib.error) as e:
        raise RegistryUnavailable(
            f"etcd holds something that is no {kind.__name__} of this version: look at what else writes there"
        ) from e
    if not isinstance(record, kind):
        raise RegistryUnavailable(f"etcd holds a {type(record).__name__} where a {kind.__name__} was due")
    return record


def _plain(value: Any) -> Any:
    """As JSON can say it; whatever is not JSON's own is an object that says what it ``is``."""
    if dataclasses.is_dataclass(value):
        fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"is": type(value).__name__, **fields}
    for kind, name, said in SPOKEN:
        if isinstance(value, kind):
            return {"is": name, "of": said(value)}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _record(found: dict[str, Any]) -> Any:
    kind = found.pop("is")
    match kind:
        case "tokens":
            return np.frombuffer(base64.b64decode(found["of"]), dtype="<i4").astype(np.int32)
        case "bytes":
            return base64.b64decode(found["of"])
        case "reason":
            return FinishReason(found["of"])
        case "json":
            return json.loads(found["of"])
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
    return KINDS[kind](**fields)
