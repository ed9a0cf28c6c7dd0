"""Which job may take whose rows: several with the same leading tokens compute them once. Pure but for the blocks that
change hands.

Only whole blocks are shared, by reference count; what lies beyond the last one is computed by each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.kv_cache import KvSequence
from kvferry.engine.vision.placed import Images, common_prefix


class RowsInTheMaking(Protocol):
    """A job that computes its prompt's rows, or has them."""

    @property
    def serial(self) -> int:
        """Unique among the jobs of a scheduler."""

    @property
    def first_tokens(self) -> NDArray[np.int32]:
        """The tokens it came with, int32 [n]."""

    @property
    def images(self) -> Images:
        """What stands at the image tokens among them."""

    @property
    def namespace(self) -> str:
        """Only jobs of the same one share rows."""

    @property
    def sequence(self) -> KvSequence:
        """Their rows so far."""

    @property
    def priority(self) -> int:
        """Higher goes first."""


@dataclass(slots=True)
class PrefixShare:
    """What one waiting job shares with others. `block_size` in positions."""

    block_size: int
    _n_common: dict[int, int] = field(default_factory=dict)  # by the other job's serial, in whole blocks

    def take(self, job: RowsInTheMaking, others: Iterable[RowsInTheMaking]) -> bool:
        """Adopt the rows that another job has by now; True when waiting for more of them saves computing them twice.

        A job never waits for one of a lower priority, which may itself be waiting for rows to be computed.
        """
        source, n_there, n_coming = None, job.sequence.n_rows, 0
        for other in (other for other in others if other.namespace == job.namespace):
            n_common = self._common(job, other)
            n_rows = self._whole(min(n_common, other.sequence.n_rows))
            if n_rows > n_there:
                source, n_there = other.sequence, n_rows
            if n_common > other.sequence.n_rows and other.priority >= job.priority:
                n_coming = max(n_coming, n_common)
        if source is not None:
            job.sequence.adopt(source, n_there)
        return n_coming > n_there

    def _common(self, job: RowsInTheMaking, other: RowsInTheMaking) -> int:
        if other.serial not in self._n_common:
            n_most = len(job.first_tokens) - 1  # one token is always computed: its logits are not shared
            n_equal = common_prefix(job.first_tokens[:n_most], other.first_tokens, job.images, other.images)
            self._n_common[other.serial] = self._whole(n_equal)
        return self._n_common[other.serial]

    def _whole(self, n_rows: int) -> int:
        return n_rows - n_rows % self.block_size
