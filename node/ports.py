"""What the parts on the engine thread need of each other, so that each can be tested on its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvferry.node.messages import LookRequest, PublishRequest, RestoreRequest


class IoPort(Protocol):
    """What the engine thread needs of the I/O threads; nothing here waits."""

    def submit(self, request: RestoreRequest | PublishRequest) -> PublishRequest | None:
        """Queue; returns a request that will not be answered."""

    def drop_waiting(self) -> list[PublishRequest]:
        """Take back publishes that have not begun."""

    def reads_stalled(self) -> bool:
        """Whether the store hangs in a restore."""

    def writes_stalled(self) -> bool:
        """Whether the store hangs in a publish."""

    def readable(self) -> bool:
        """Whether a restore makes sense now."""


class VisionPort(Protocol):
    """What the engine thread needs of the vision thread; nothing here waits."""

    @property
    def merge_size(self) -> int:
        """Of the model's vision tower."""

    def submit(self, request: LookRequest) -> None:
        """Queue; a LookDone answers it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreLimits:
    """The few settings the engine thread needs; see config.py."""

    max_sessions: int
    publish_every_tokens: int
    publish_min_tokens: int
    restore_min_tokens: int
    restore_deadline_seconds: float
    saves_images: bool = True  # the store's snapshots say what images show
