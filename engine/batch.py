"""Rows on their way into a step: chunks of sequences side by side, and the slots that describe them to the jitted code.

A slot's arrays are filled anew for each step that uses it. A worker thread that is late may still read them, so a slot
keeps what its addresses point into until it is filled again (sync.py says when that may be).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.config import ModelConfig
from kvferry.engine.kernels import records
from kvferry.engine.kernels.attention import tile_tokens
from kvferry.engine.kernels.forward import PHASES_BESIDE_LAYERS, PHASES_PER_LAYER
from kvferry.engine.kernels.work import PHASE_BYTES
from kvferry.engine.kv_cache import KvSequence
from kvferry.engine.memory import aligned_empty
from kvferry.engine.mrope import mrope_rows

_F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sight:
    """What tokens have beside their ids in a sequence with images.

    ``positions``: int32 [3, n], time, row and column of each of the chunk's tokens. ``image_rows``: int64 [m], which of
    them are image tokens; ``embeds`` float32 [m, hidden] stand in for their embeddings, ``deepstack`` float32
    [m, n_deepstack, hidden] is added to them after each of the first layers.
    """

    positions: NDArray[np.int32]
    image_rows: NDArray[np.int64]
    embeds: _F32
    deepstack: _F32


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens to append to a sequence, and which of their rows get logits. ``sight``: None in a sequence of text."""

    sequence: KvSequence
    token_ids: NDArray[np.int32]
    logits: Literal["none", "last", "all"] = "last"
    sight: Sight | None = None

    @property
    def n_logit_rows(self) -> int:
        return {"none": 0, "last": 1, "all": len(self.token_ids)}[self.logits]


@dataclass(frozen=True, slots=True)
class _Piece:
    """What a step takes of a chunk: its tokens [begin, end), the step's rows from ``row`` on."""

    chunk: Chunk
    begin: int
    end: int
    row: int

    @property
    def n_logit_rows(self) -> int:
        """The chunk's last ones are those with logits."""
        return max(0, min(self.end - self.begin, self.end - len(self.chunk.token_ids) + self.chunk.n_logit_rows))


class _Rows:
    """Arrays that one STEP record points into, each with room for ``n`` rows."""

    def __init__(self, record: NDArray[Any], n: int) -> None:
        self.record = record
        self.tokens, self.from_rows, self.positions = (np.zeros(n, np.int32) for _ in range(3))
        self.rope_rows, self.given, self.deepstack, self.tables = (np.zeros(n, np.int64) for _ in range(4))
        self.tile_starts: NDArray[np.int32] = np.zeros(n + 1, np.int32)
        arrays: dict[str, NDArray[Any]] = {
            "tokens_at": self.tokens,
            "from_rows_at": self.from_rows,
            "positions_at": self.positions,
            "rope_rows_at": self.rope_rows,
            "given_rows_at": self.given,
            "deepstack_at": self.deepstack,
            "block_tables_at": self.tables,
            "tile_starts_at": self.tile_starts,
        }
        for field, array in arrays.items():
            record[field] = array.ctypes.data

    def set_tiles(self, tile_starts: list[int], n_rows: int) -> None:
        n_tiles = len(tile_starts)
        self.tile_starts[:n_tiles] = tile_starts
        self.tile_starts[n_tiles] = n_rows
        self.record["n_tiles"] = n_tiles
        self.record["n_rows"] = n_rows

    def copy_of(self, others: _Rows, which: NDArray[np.int32]) -> None:
        n = len(which)
        self.from_rows[:n] = which
        for name in ("positions", "rope_rows", "deepstack", "tables"):
            getattr(self, name)[:n] = getattr(others, name)[which]


class StepSlots:
    """Slots for steps of up to ``max_rows`` rows. ``records``: two for each slot, as ``run_steps`` takes them."""

    def __init__(self, n_slots: int, max_rows: int, config: ModelConfig, rope: _F32) -> None:
        self._config = config
        self._rope = rope
        self._rope_at: Final = int(rope.ctypes.data)
        self._tile_tokens: Final = tile_tokens(config.n_heads // config.n_kv_heads)
        self.records: Final[NDArray[Any]] = np.zeros(2 * n_slots, records.STEP)
        self._rows = [_Rows(self.records[i : i + 1], max_rows) for i in range(2 * n_slots)]
        self._kept: list[list[Any]] = [[] for _ in range(n_slots)]
        n_phases = config.n_layers * PHASES_PER_LAYER + PHASES_BESIDE_LAYERS
        lines = aligned_empty(n_slots * n_phases * PHASE_BYTES)
        self.phases: Final = lines.view(np.int64).reshape(n_slots, -1)

    def fill(self, slot: int, chunks: Sequence[Chunk], start: int, stop: int, logits_at: int) -> int:
        """Describe rows [start, stop) of the chunks in a line; returns how many get logits, from ``logits_at`` on."""
        rows, going_on = self._rows[2 * slot : 2 * slot + 2]
        n_rows = stop - start
        kept: list[Any] = []
        tile_starts: list[int] = []
        seen: list[_Piece] = []
        going: list[range] = []
        for piece in _pieces(chunks, start, stop):
            chunk, row, n = piece.chunk, piece.row, piece.end - piece.begin
            table = chunk.sequence.block_table
            kept.append(table)
            position = chunk.sequence.n_rows + piece.begin
            if n == 1:
                rows.tokens[row] = chunk.token_ids[piece.begin]
                rows.positions[row] = position
                rows.tables[row] = table.ctypes.data
                tile_starts.append(row)
            else:
                rows.tokens[row : row + n] = chunk.token_ids[piece.begin : piece.end]
                rows.positions[row : row + n] = np.arange(position, position + n)
                rows.tables[row : row + n] = table.ctypes.data
                tile_starts.extend(range(row, row + n, self._tile_tokens))
            going.append(range(row + n - piece.n_logit_rows, row + n))
            if chunk.sight is not None:
                seen.append(piece)
        np.multiply(rows.positions[:n_rows], self._rope.strides[0], out=rows.rope_rows[:n_rows])
        rows.rope_rows[:n_rows] += self._rope_at
        rows.set_tiles(tile_starts, n_rows)
        self._look(rows, seen, kept)
        n_going = sum(map(len, going))
        if n_going < n_rows:
            going_on.copy_of(rows, np.array([row for part in going for row in part], np.int32))
            going_on.record["n_deepstack"] = rows.record["n_deepstack"]
        self._set_going(going_on, going, n_going)
        rows.record["logits_at"] = going_on.record["logits_at"] = logits_at
        self._kept[slot] = kept
        self.phases[slot] = 0
        return n_going

    def fill_with_nothing(self, slot: int) -> None:
        """Describe the step without rows that ends the worker threads."""
        self.records["n_rows"][2 * slot] = 0

    def _set_going(self, going_on: _Rows, going: list[range], n_going: int) -> None:
        tile_starts: list[int] = []
        row = 0
        for part in going:
            tile_starts.extend(range(row, row + len(part), self._tile_tokens))
            row += len(part)
        going_on.set_tiles(tile_starts, n_going)

    def _look(self, rows: _Rows, pieces: list[_Piece], kept: list[Any]) -> None:
        """Enter what rows of sequences with images have beside their tokens."""
        if not pieces and not rows.given.any():
            rows.record["n_deepstack"] = 0
            return
        rows.given[:] = 0
        rows.deepstack[:] = 0
        n_deepstack = 0
        for piece in pieces:
            sight = piece.chunk.sight
            if sight is None:
                continue
            n, first = piece.end - piece.begin, piece.row
            positions = sight.positions[:, piece.begin : piece.end]
            turned = mrope_rows(self._rope, positions, self._config.mrope_section or (0, 0, 0))
            embeds, deepstack = np.ascontiguousarray(sight.embeds), np.ascontiguousarray(sight.deepstack)
            kept += [turned, embeds, deepstack]
            rows.rope_rows[first : first + n] = turned.ctypes.data + np.arange(n) * turned.strides[0]
            images = np.flatnonzero((sight.image_rows >= piece.begin) & (sight.image_rows < piece.end))
            at = first + sight.image_rows[images] - piece.begin
            rows.given[at] = embeds.ctypes.data + images * embeds.strides[0]
            if len(images) and deepstack.shape[1]:
                rows.deepstack[at] = deepstack.ctypes.data + images * deepstack.strides[0]
                n_deepstack = deepstack.shape[1]
        rows.record["n_deepstack"] = n_deepstack


def _pieces(chunks: Sequence[Chunk], start: int, stop: int) -> Iterator[_Piece]:
    """What rows [start, stop) of all chunks in a line are, chunk by chunk."""
    first = 0
    for chunk in chunks:
        n = len(chunk.token_ids)
        begin, end = max(first, start), min(first + n, stop)
        if begin < end:
            yield _Piece(chunk, begin - first, end - first, begin - start)
        first += n
