"""How long until a node shows the first token of a turn, in parts. Pure.

    queue      the way there, until a slot of its batch is free, reads and looks before its own, and prefills that share
               the engine with it; or the prefill of another turn that begins with the same tokens
    restore    rows that it lacks and the store has, at the rate it reads
    look       pictures among what is left, at the rate its vision tower works
    prefill    what is left, at the rate it computes at that depth, slower beside decodes

Rows come from the node's memory, or from the store if that covers more; the store is left alone where computing is
sooner than reading. A node computes what two turns begin with once: the second one waits for the first one's rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

from kvferry.coordinator.backlog import NOTHING_AHEAD, Ahead, prefill_ends, prefills_after
from kvferry.coordinator.membership import Member
from kvferry.coordinator.rates import Rates

DEFAULT_MAX_RUNNING: Final = 8
"""Of a node that does not say how many turns it runs at once."""

GUESSED_TURN_SECONDS: Final = 10.0
"""How long a turn holds its slot, for want of a measurement."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is known of one node's speed and of the work it has, at the moment of the decision."""

    rates: Rates = dataclasses.field(default_factory=Rates)
    # What is left of the turns there that wait for their first token.
    ahead: Ahead = NOTHING_AHEAD
    # How long a turn holds a slot, from its first token to its last.
    turn_s: float = GUESSED_TURN_SECONDS


UNKNOWN: Final = Forecast()


@dataclasses.dataclass(frozen=True, slots=True)
class Coming:
    """Rows that a turn of a node is computing, and seconds until it has them."""

    n_tokens: int = 0
    seconds: float = 0.0


NOTHING_COMING: Final = Coming()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowSources:
    """Rows of the request that could be had without computing them; at most all but one."""

    n_tokens: int
    n_resident: int
    n_stored: int
    bytes_per_row: int
    # Of these, rows that a turn there is computing now, and in how many seconds it has them.
    n_coming: int = 0
    coming_s: float = 0.0
    # (first, end) tokens of each picture.
    images: Sequence[tuple[int, int]] = ()

    def n_to_look_at(self, n_reused: int) -> int:
        """Image tokens of the pictures that end behind so many rows."""
        return sum(end - start for start, end in self.images if end > n_reused)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Seconds until the first token, in parts, and what the node would do meanwhile."""

    queue_seconds: float
    restore_seconds: float
    prefill_seconds: float
    # The same prefill on an engine that has nothing else to do.
    work_seconds: float
    n_restored: int
    n_computed: int
    # The store has more than memory, and computing is sooner than reading.
    recompute: bool
    look_seconds: float = 0.0
    # Rows of a turn that still computes them are waited for.
    awaits_rows: bool = False
    # Of the queue: the share of the engine that other prompts take meanwhile.
    shared_seconds: float = 0.0
    # By how much the turns that wait for their first token there would wait longer, all together.
    others_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return self.queue_seconds + self.restore_seconds + self.look_seconds + self.prefill_seconds

    @property
    def cost_seconds(self) -> float:
        """What the choice of this node costs everybody who waits."""
        return self.seconds + self.others_seconds


def predict(member: Member, rows: RowSources, forecast: Forecast, n_turns: int) -> Prediction:
    """``n_turns``: turns on the node, running or waiting."""
    beside_decodes = n_turns > len(forecast.ahead.prefilling_s)
    if rows.n_coming > rows.n_resident:
        from_memory = _way(rows, rows.n_coming, 0, forecast, beside_decodes=beside_decodes, wait_s=rows.coming_s)
        from_memory = dataclasses.replace(from_memory, awaits_rows=True)
    else:
        from_memory = _way(rows, rows.n_resident, 0, forecast, beside_decodes=beside_decodes)
    best, recompute = from_memory, False
    if rows.n_stored > rows.n_resident:
        from_store = _way(rows, 0, rows.n_stored, forecast, beside_decodes=beside_decodes)
        # a tie goes to reading: it leaves the engine to others
        recompute = from_memory.seconds < from_store.seconds
        best = from_memory if recompute else from_store
    slot_s = slot_wait(n_turns, member.node.max_running or DEFAULT_MAX_RUNNING, forecast.turn_s)
    if slot_s or recompute:
        return dataclasses.replace(best, queue_seconds=best.queue_seconds + slot_s, recompute=recompute)
    return best


def _way(
    rows: RowSources, n_resident: int, n_restored: int, forecast: Forecast, *, beside_decodes: bool, wait_s: float = 0.0
) -> Prediction:
    """One way to get the rows; a restore replaces what memory had. ``wait_s``: until memory has them."""
    rates, ahead = forecast.rates, forecast.ahead
    n_reused = max(n_resident, n_restored)
    restore_s = rates.restore_seconds(n_restored * rows.bytes_per_row)
    look_s = rates.look_per_token * rows.n_to_look_at(n_reused)
    before_s = (
        wait_s + restore_s + look_s + (ahead.reading_s if n_restored else 0.0) + (ahead.looking_s if look_s else 0.0)
    )
    work_s = rates.prefill_seconds(n_reused, rows.n_tokens)
    decoding, shared_s, others_s = beside_decodes, 0.0, 0.0
    if ahead.prefilling_s:
        others = prefills_after(before_s, ahead.prefilling_s, rates.decode_drag, beside_decodes=beside_decodes)
        decoding |= before_s > 0 and 0.0 in others  # what is done by then decodes by then
        without = prefill_ends(others, rates.decode_drag, beside_decodes=decoding)
        *beside, own_s = prefill_ends((*others, work_s), rates.decode_drag, beside_decodes=decoding)
        shared_s = own_s - work_s * (rates.decode_drag if decoding else 1.0)
        others_s = sum(beside) - sum(without)
    start_s = rates.start_beside_decodes if beside_decodes else rates.start_idle
    return Prediction(
        queue_seconds=start_s + before_s - restore_s - look_s + shared_s,
        shared_seconds=shared_s,
        others_seconds=others_s,
        restore_seconds=restore_s,
        look_seconds=look_s,
        prefill_seconds=work_s * (rates.decode_drag if decoding else 1.0),
        work_seconds=work_s,
        n_restored=n_restored,
        n_computed=rows.n_tokens - n_reused,
        recompute=False,
    )


def slot_wait(n_turns: int, max_running: int, turn_s: float) -> float:
    """Turns in a full batch end one by one, evenly spread over the time that one takes."""
    n_before = n_turns - max_running + 1
    return max(0, n_before) * turn_s / max_running


def forecast_of(forecasts: Mapping[str, Forecast], node_id: str) -> Forecast:
    return forecasts.get(node_id, UNKNOWN)
