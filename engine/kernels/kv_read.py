"""Snapshots read from a file into the cache's tiles without the GIL: verified while what was read lies in the
processor's second-level cache, beside another thread that does the same.

``fd`` is a file's descriptor, ``offset`` where in it to begin. Every kernel says whether all went well. When it did
not (damage, a short read, an error of the system), the caller reads the same in its own way and finds out what it was.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.kernels.digest_ir import DIGEST_BYTES, STRIPE_BYTES
from kvferry.engine.kernels.intrinsics import copy_xxh3_128, load_float, read_vector, xxh3_128
from kvferry.engine.kernels.jit import kernel
from kvferry.engine.kernels.kv_copy import rows_to_tiles
from kvferry.engine.kernels.layout import FLOAT_BYTES, KV_BLOCK

RUN_BYTES: Final = 512 << 10
"""What is read before it is looked at: well within a second-level cache, and longer than a call's overhead."""
_MOST_BUFFERS: Final = 1024  # that the system takes in one call
_INFINITY: Final = np.float32(np.inf)


@kernel
def _is_as_expected(
    block: int, n_bytes: int, target: int, expected: NDArray[np.uint8], made: NDArray[np.uint8]
) -> bool:
    """Whether a block has a digest; it is copied to ``target`` meanwhile, if that is another address."""
    if target == block:
        xxh3_128(block, n_bytes, made.ctypes.data)
    else:
        copy_xxh3_128(block, n_bytes, target, made.ctypes.data)
    n_alike = 0
    for byte in range(DIGEST_BYTES):
        n_alike += made[byte] == expected[byte]
    return n_alike == DIGEST_BYTES


@kernel
def _scales_are_sane(block: int, n_tiles: int, tile_bytes: int, n_values: int) -> bool:
    """Whether all scales of a q8 block are finite and not negative."""
    for tile in range(n_tiles):
        scales = block + tile * tile_bytes + n_values
        for position in range(KV_BLOCK):
            scale = load_float(scales + position * FLOAT_BYTES)
            if not (scale >= np.float32(0) and scale < _INFINITY):
                return False
    return True


@kernel
def read_tiles(
    fd: int,
    offset: int,
    layer: int,
    stride: int,
    blocks: NDArray[np.int32],
    expected: NDArray[np.uint8],
    n_tiles: int,
    tile_bytes: int,
    n_values: int,
) -> bool:
    """Blocks of ``n_tiles`` tiles each, one after the other in the file, into the tiles' own memory.

    Block b goes to address ``layer`` + b * ``stride``. ``expected``: their XXH3-128 [blocks * 16], or nothing.
    ``n_values``: bytes before the scales of a q8 tile; not less than ``tile_bytes`` for other kinds.
    """
    n_bytes = n_tiles * tile_bytes
    most = max(1, min(RUN_BYTES // n_bytes, _MOST_BUFFERS))
    buffers, made = np.empty((most, 2), np.int64), np.empty(DIGEST_BYTES, np.uint8)
    # What is hashed passes through a register anyway: from there it goes to its place, and the system reads into
    # memory that stays in the processor's cache, in one piece.
    copies = len(expected) > 0 and (layer | stride | n_bytes) % STRIPE_BYTES == 0
    passing = np.empty(most * n_bytes if copies else 0, np.uint8)
    for first in range(0, len(blocks), most):
        n = min(most, len(blocks) - first)
        for index in range(n):
            buffers[index, 0], buffers[index, 1] = layer + blocks[first + index] * stride, n_bytes
        if copies:
            buffers[0, 0], buffers[0, 1] = passing.ctypes.data, n * n_bytes
        if read_vector(fd, buffers.ctypes.data, 1 if copies else n, offset + first * n_bytes) != n * n_bytes:
            return False
        for index in range(n):
            at = (first + index) * DIGEST_BYTES
            target = layer + blocks[first + index] * stride
            block = passing.ctypes.data + index * n_bytes if copies else target
            wanted = expected[at : at + DIGEST_BYTES]
            if len(expected) > 0 and not _is_as_expected(block, n_bytes, target, wanted, made):
                return False
            if n_values < tile_bytes and not _scales_are_sane(block, n_tiles, tile_bytes, n_values):
                return False
    return True


@kernel
def read_rows(
    fd: int,
    offset: int,
    n_rows: int,
    block_size: int,
    tiles: NDArray[Any],
    layer: int,
    table: NDArray[np.int32],
    start: int,
    head_dim: int,
) -> bool:
    """Float32 rows as version 1 files hold them, whole blocks of K rows and then V rows, to positions ``start`` on.

    ``tiles`` and ``table`` as kv_copy.rows_to_tiles takes them.
    """
    kv_dim = tiles.shape[3] * head_dim
    block_bytes = 2 * block_size * kv_dim * FLOAT_BYTES
    most = max(1, RUN_BYTES // block_bytes)
    scratch, buffer = np.empty((most, 2, block_size, kv_dim), np.uint32), np.empty((1, 2), np.int64)
    bytes_of = scratch.view(np.uint8).reshape((most * 2 * block_size, -1))
    n_blocks = n_rows // block_size
    for first in range(0, n_blocks, most):
        n = min(most, n_blocks - first)
        buffer[0, 0], buffer[0, 1] = scratch.ctypes.data, n * block_bytes
        if read_vector(fd, buffer.ctypes.data, 1, offset + first * block_bytes) != n * block_bytes:
            return False
        for index in range(n):
            at = start + (first + index) * block_size
            rows_to_tiles(tiles, layer, table, at, scratch[index, 0], scratch[index, 1], (bytes_of, bytes_of), head_dim)
    return True
