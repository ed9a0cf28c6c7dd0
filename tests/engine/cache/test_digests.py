"""The digests that a restore compares without the GIL are xxHash's own."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from kvferry.engine.kernels.kv_read import read_tiles
from kvferry.engine.memory import aligned_empty


@pytest.mark.parametrize("off_border", [0, 16])  # on a border of 64 bytes blocks are copied while they are judged
@pytest.mark.parametrize("n_bytes", [241, 256, 1023, 1024, 1025, 1087, 1088, 1089, 2048, 13_056, 49_152, 50_001])
def test_blocks_are_taken_by_their_xxh3_128_only(n_bytes, off_border, tmp_path):
    data = np.random.default_rng(n_bytes).integers(0, 256, (3, n_bytes), np.uint8)
    path = tmp_path / "blocks"
    path.write_bytes(b"head" + data.tobytes())
    digests = np.frombuffer(b"".join(xxhash.xxh3_128_digest(block) for block in data), np.uint8).copy()
    memory = aligned_empty(4 * n_bytes + 64)[off_border : off_border + 4 * n_bytes].reshape(4, n_bytes)
    memory[:] = 0
    blocks = np.array([3, 0, 1], np.int32)
    with path.open("rb") as file:

        def read(expected):
            return read_tiles(file.fileno(), 4, memory.ctypes.data, n_bytes, blocks, expected, 1, n_bytes, n_bytes)

        assert read(digests)
        assert np.array_equal(memory[blocks], data)
        assert not memory[2].any()
        for byte in range(0, 48, 5):
            wrong = digests.copy()
            wrong[byte] ^= 0x10
            assert not read(wrong)
        assert not read_tiles(file.fileno(), 5, memory.ctypes.data, n_bytes, blocks, digests[:0], 1, n_bytes, n_bytes)
    assert not read_tiles(1 << 20, 4, memory.ctypes.data, n_bytes, blocks, digests[:0], 1, n_bytes, n_bytes)
