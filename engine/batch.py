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
from kvferry.engine.kernels.intrinsics import ISA
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
    def is_decode(self) -> bool:
        """Whether it is one token that gets logits, and nothing else."""
        return len(self.token_ids) == 1 and self.logits != "none" and self.sight is None

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
        # A step's numbers are set all at once: Python code between two steps keeps every thread waiting.
        self.numbers: Final = record.view(np.int64)[: records.N_STEP_NUMBERS]
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
        self.has_given = False

    def set_tiles(self, tile_starts: list[int], n_rows: int) -> None:
        self.tile_starts[: len(tile_starts) + 1] = [*tile_starts, n_rows]

    def copy_of(self, others: _Rows, which: NDArray[np.int32]) -> None:
        n = len(which)
        self.from_rows[:n] = which
        for name in ("positions", "rope_rows", "deepstack", "tables"):
            getattr(self, name)[:n] = getattr(others, name)[which]


def tile_rows(config: ModelConfig) -> int:
    """Rows of a sequence that attention takes together: it reads the keys once for all of them."""
    return tile_tokens(config.n_heads // config.n_kv_heads)


def pass_rows(config: ModelConfig) -> int:
    """Of those, how many it computes with at a time: fewer take as long."""
    return max(1, ISA.attention_rows // (config.n_heads // config.n_kv_heads))


class StepSlots:
    """Slots for steps of up to ``max_rows`` rows. ``records``: two for each slot, as ``run_steps`` takes them."""

    def __init__(self, n_slots: int, max_rows: int, config: ModelConfig, rope: _F32) -> None:
        self._config = config
        self._rope = rope
        self._rope_at: Final = int(rope.ctypes.data)
        self._rope_stride: Final = rope.strides[0]
        self._tile_tokens: Final = tile_rows(config)
        self.records: Final[NDArray[Any]] = np.zeros(2 * n_slots, records.STEP)
        self._rows = [_Rows(self.records[i : i + 1], max_rows) for i in range(2 * n_slots)]
        self._kept: list[list[Any]] = [[] for _ in range(n_slots)]
        n_phases = config.n_layers * PHASES_PER_LAYER + PHASES_BESIDE_LAYERS
        lines = aligned_empty(n_slots * n_phases * PHASE_BYTES)
        self.phases: Final = lines.view(np.int64).reshape(n_slots, -1)

    def fill(self, slot: int, chunks: Sequence[Chunk], start: int, stop: int, logits_at: int) -> int:
        """Describe rows [start, stop) of the chunks in a line; returns how many get logits, from ``logits_at`` on."""
        rows, going_on = self._rows[2 * slot : 2 * slot + 2]
        n_rows, n_deepstack = stop - start, 0
        if rows.has_given:
            rows.given[:] = rows.deepstack[:] = 0
            rows.has_given = False
        if n_rows == len(chunks) and all(chunk.is_decode for chunk in chunks):
            self._kept[slot] = self._fill_decodes(rows, chunks)
            n_tiles = n_going = n_rows
            going_on.numbers[0] = n_going
        else:
            pieces = list(_pieces(chunks, start, stop))
            kept: list[Any] = []
            self._kept[slot] = kept
            n_tiles = self._fill_pieces(rows, pieces, kept)
            for piece in pieces:
                if piece.chunk.sight is not None:
                    n_deepstack = max(n_deepstack, self._look(rows, piece, piece.chunk.sight, kept))
            n_going, n_going_tiles = self._fill_going_on(going_on, rows, pieces)
            going_on.numbers[:] = n_going, n_going_tiles, n_deepstack, logits_at
        rows.numbers[:] = n_rows, n_tiles, n_deepstack, logits_at
        self.phases[slot] = 0
        return n_going

    def fill_with_nothing(self, slot: int) -> None:
        """Describe the step without rows that ends the worker threads."""
        self._rows[2 * slot].numbers[0] = 0

    def _fill_decodes(self, rows: _Rows, chunks: Sequence[Chunk]) -> list[Any]:
        """One token of each sequence, all with logits: what most steps are. Returns what addresses point into."""
        n = len(chunks)
        sequences = [chunk.sequence for chunk in chunks]
        positions = [sequence.n_rows for sequence in sequences]
        tables = [sequence.block_table for sequence in sequences]
        rows.tokens[:n] = [chunk.token_ids[0] for chunk in chunks]
        rows.positions[:n] = positions
        rows.rope_rows[:n] = [self._rope_at + position * self._rope_stride for position in positions]
        rows.tables[:n] = [table.ctypes.data for table in tables]
        rows.tile_starts[: n + 1] = range(n + 1)
        return tables

    def _fill_pieces(self, rows: _Rows, pieces: Sequence[_Piece], kept: list[Any]) -> int:
        """Returns how many tiles attention has."""
        tile_starts: list[int] = []
        n_rows = 0
        for piece in pieces:
            part = slice(piece.row, piece.row + piece.end - piece.begin)
            table = piece.chunk.sequence.block_table
            kept.append(table)
            position = piece.chunk.sequence.n_rows + piece.begin
            rows.tokens[part] = piece.chunk.token_ids[piece.begin : piece.end]
            rows.positions[part] = range(position, position + part.stop - part.start)
            rows.tables[part] = table.ctypes.data
            tile_starts.extend(range(part.start, part.stop, self._tile_tokens))
            n_rows = part.stop
        rows.rope_rows[:n_rows] = rows.positions[:n_rows]
        rows.rope_rows[:n_rows] *= self._rope_stride
        rows.rope_rows[:n_rows] += self._rope_at
        rows.set_tiles(tile_starts, n_rows)
        return len(tile_starts)

    def _fill_going_on(self, going_on: _Rows, rows: _Rows, pieces: Sequence[_Piece]) -> tuple[int, int]:
        """The rows with logits, unless all have some. Returns how many, and how many tiles."""
        parts = [range(p.row + p.end - p.begin - p.n_logit_rows, p.row + p.end - p.begin) for p in pieces]
        tile_starts: list[int] = []
        n_going = 0
        for part in parts:
            tile_starts.extend(range(n_going, n_going + len(part), self._tile_tokens))
            n_going += len(part)
        going_on.set_tiles(tile_starts, n_going)
        if n_going < sum(piece.end - piece.begin for piece in pieces):
            going_on.copy_of(rows, np.array([row for part in parts for row in part], np.int32))
        return n_going, len(tile_starts)

    def _look(self, rows: _Rows, piece: _Piece, sight: Sight, kept: list[Any]) -> int:
        """Enter what rows of a sequence with images have beside their tokens; returns for how many layers."""
        n, first = piece.end - piece.begin, piece.row
        positions = sight.positions[:, piece.begin : piece.end]
        turned = mrope_rows(self._rope, positions, self._config.mrope_section or (0, 0, 0))
        embeds, deepstack = np.ascontiguousarray(sight.embeds), np.ascontiguousarray(sight.deepstack)
        kept += [turned, embeds, deepstack]
        rows.rope_rows[first : first + n] = turned.ctypes.data + np.arange(n) * turned.strides[0]
        images = np.flatnonzero((sight.image_rows >= piece.begin) & (sight.image_rows < piece.end))
        if not len(images):
            return 0
        rows.has_given = True
        at = first + sight.image_rows[images] - piece.begin
        rows.given[at] = embeds.ctypes.data + images * embeds.strides[0]
        if deepstack.shape[1]:
            rows.deepstack[at] = deepstack.ctypes.data + images * deepstack.strides[0]
        return int(deepstack.shape[1])


def _pieces(chunks: Sequence[Chunk], start: int, stop: int) -> Iterator[_Piece]:
    """What rows [start, stop) of all chunks in a line are, chunk by chunk."""
    first = 0
    for chunk in chunks:
        n = len(chunk.token_ids)
        begin, end = max(first, start), min(first + n, stop)
        if begin < end:
            yield _Piece(chunk, begin - first, end - first, begin - start)
        first += n
