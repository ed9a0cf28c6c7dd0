"""Promise 7: partial restore reads the right rows. Every n in 1..130, every common prefix 0..n, three layers: 8,645
cases, of whole files and of chains of three segments."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.store.faults import FaultyFileSystem
from kvferry.store.geometry import KvGeometry
from kvferry.store.memory_rows import MemoryRows

from .no_sync import NoSync


def _check_all_prefixes(make_store, make_rows, tiny: KvGeometry, n_tokens: int, fs=None, version: int = 1) -> int:
    ids = np.arange(1, n_tokens + 1)
    rows = make_rows(tiny, n_tokens)
    store = make_store(fingerprint=f"n{n_tokens}", fs=fs, version=version)
    for end in sorted({n_tokens} | ({n_tokens // 5 + 1, n_tokens // 2 + 1} if version == 3 else set())):
        store.publish(ids[:end], rows)
    for n_common in range(n_tokens + 1):
        request = np.append(ids[:n_common], [1000, 1001])
        match = store.find(request, min_tokens=1)
        if n_common == 0:
            assert match is None
            continue
        assert match.n_common == n_common
        restored = MemoryRows.empty(tiny, n_common)
        store.restore(match, n_common, restored)
        assert np.array_equal(restored.k, rows.k[:, :n_common])
        assert np.array_equal(restored.v, rows.v[:, :n_common])
    return n_tokens + 1


@pytest.mark.parametrize("version", [1, 3])
def test_every_prefix_of_every_length(make_store, make_rows, tiny: KvGeometry, version: int) -> None:
    lengths = range(1, 131)
    assert sum(_check_all_prefixes(make_store, make_rows, tiny, n, NoSync(), version) for n in lengths) == 8_645


@pytest.mark.parametrize("max_io_bytes", [1, 7, 4096])
def test_short_reads_and_writes_change_nothing(make_store, make_rows, tiny: KvGeometry, max_io_bytes: int) -> None:
    fs = FaultyFileSystem(max_io_bytes=max_io_bytes)
    _check_all_prefixes(make_store, make_rows, tiny, 5 if max_io_bytes == 1 else 40, fs)
