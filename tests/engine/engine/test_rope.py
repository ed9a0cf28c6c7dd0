"""The table of rope angles, and the rows that tokens of images take out of it."""

from __future__ import annotations

import numpy as np

from kvferry.engine.mrope import mrope_rows
from kvferry.engine.rope import inverse_frequencies, rope_table


def test_the_table_is_cosine_and_sine_however_long_it_is() -> None:
    table = rope_table(9000, 64, 10_000.0)
    assert rope_table(4100, 64, 10_000.0).tobytes() == table[:4100].tobytes()
    angles = np.arange(9000, dtype=np.float32)[:, None] * inverse_frequencies(64, 10_000.0)
    assert np.abs(table[:, 0] - np.cos(angles.astype(np.float64))).max() < 1e-7
    assert np.abs(table[:, 1] - np.sin(angles.astype(np.float64))).max() < 1e-7


def test_frequencies_turn_by_time_row_and_column_in_turns() -> None:
    table = rope_table(50, 16, 10_000.0)
    rows = mrope_rows(table, np.array([[7, 3], [7, 20], [7, 40]], np.int32), (4, 2, 2))
    assert rows[0].tobytes() == table[7].tobytes()
    by = [3, 20, 40, 3, 20, 40, 3, 3]  # the shares of row and column reach as far as frequency 5
    assert all(np.array_equal(rows[1, :, i], table[by[i], :, i]) for i in range(8))
