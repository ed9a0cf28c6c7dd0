"""The codec against the format document: header bytes, sizes, the hash, and where rows lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.store import vlkv
from kvferry.store.errors import EXIT_CODES, SnapshotRejected
from kvferry.store.fs import PosixFileSystem
from kvferry.store.geometry import KvGeometry, TokenIds
from kvferry.store.reader import open_snapshot

QWEN3_VL_2B = KvGeometry(28, 8, 128)

geometries = st.builds(
    KvGeometry,
    st.integers(1, vlkv.MAX_LAYERS),
    st.integers(1, vlkv.MAX_KV_HEADS),
    st.integers(1, vlkv.MAX_HEAD_DIM),
    st.sampled_from(vlkv.BLOCK_SIZES),
)


def test_header_is_the_one_of_the_format_document() -> None:
    published = (
        "564b4c56 01000000 1c000000 08000000 80000000 20000000 08080000 00040000"
        "b89cb5a60a3bdba0 00000000 0000000000000000000000000000000000000000"
    )
    assert vlkv.build_header(QWEN3_VL_2B, 2056, 0xA0DB3B0AA6B59CB8) == bytes.fromhex(published)


def test_headers_and_hashes_are_those_of_the_golden_files(manifest: dict[str, Any], golden_ids: TokenIds) -> None:
    for case in manifest["good"]:
        token_hash = vlkv.fnv1a(golden_ids[: case["n_tokens"]])
        assert f"{token_hash:016x}" == case["hash_hex"]
        assert vlkv.build_header(KvGeometry(3, 2, 64), case["n_tokens"], token_hash).hex() == case["first64"]
        assert f"good/{vlkv.file_name(token_hash)}" == case["file"]


# Promise 3: the sizes of the document, in Python integers, beyond 2 GiB too.
SIZES_2B = {n: 64 + n * 229_380 for n in (1, 31, 32, 33, 2056, 8109, 8192)}


@pytest.mark.parametrize(("n_tokens", "n_bytes"), SIZES_2B.items())
def test_size_of_a_2b_snapshot(n_tokens: int, n_bytes: int) -> None:
    assert vlkv.file_bytes(QWEN3_VL_2B, n_tokens) == n_bytes


def test_two_sizes_by_the_document() -> None:
    assert SIZES_2B[2056] == 471_605_344
    assert SIZES_2B[8192] == 1_879_081_024
    assert vlkv.file_bytes(KvGeometry(48, 4, 128), 30_000) == 64 + 30_000 * 196_612  # 5.9 GB: no 32-bit wrap


@pytest.mark.parametrize("n_tokens", SIZES_2B)
@pytest.mark.parametrize("excess", [-1, 0, 1])
def test_a_sparse_file_is_taken_at_exactly_its_size(tmp_path: Path, n_tokens: int, excess: int) -> None:
    ids = np.zeros(n_tokens, np.int32)
    path = tmp_path / vlkv.file_name(vlkv.fnv1a(ids))
    with path.open("wb") as file:
        file.write(vlkv.build_header(QWEN3_VL_2B, n_tokens, vlkv.fnv1a(ids)))
        file.truncate(SIZES_2B[n_tokens] + excess)
    if excess == 0:
        with open_snapshot(PosixFileSystem(), path, QWEN3_VL_2B) as snapshot:
            snapshot.check(151_936, path.name)
            assert snapshot.n_tokens == n_tokens
    else:
        with (
            pytest.raises(SnapshotRejected, match="size_mismatch"),
            open_snapshot(PosixFileSystem(), path, QWEN3_VL_2B),
        ):
            pass


@given(geometries, st.integers(1, vlkv.MAX_TOKENS), st.integers(0, 2**64 - 1))
def test_a_header_is_read_as_it_was_built(geometry: KvGeometry, n_tokens: int, token_hash: int) -> None:
    data = vlkv.build_header(geometry, n_tokens, token_hash)
    header = vlkv.parse_header(data)
    assert len(data) == vlkv.HEADER_BYTES
    assert (header.geometry, header.file_n_tokens, header.token_hash) == (geometry, n_tokens, token_hash)
    vlkv.check_header(header, vlkv.file_bytes(geometry, n_tokens), geometry)
    assert b"".join(raw for _, _, raw in vlkv.header_fields(data)) == data


@given(st.binary(max_size=80), st.integers(0, 2**48))
def test_any_bytes_are_judged_with_a_declared_refusal(data: bytes, n_bytes: int) -> None:
    with pytest.raises(SnapshotRejected) as caught:
        vlkv.check_header(vlkv.parse_header(data), n_bytes, None)
    assert caught.value.exit_code == EXIT_CODES[caught.value.reason]


@given(st.data())
def test_any_damage_to_a_good_header_is_judged_with_a_declared_refusal(data: st.DataObject) -> None:
    geometry = KvGeometry(3, 2, 64)
    good = vlkv.build_header(geometry, 33, 0x5FCE35C90480AB16)
    position = data.draw(st.integers(0, 63).filter(lambda at: not 32 <= at < 40))  # the hash is judged with the ids
    replacement = data.draw(st.binary(min_size=1, max_size=64 - position))
    damaged = good[:position] + replacement + good[position + len(replacement) :]
    changed = damaged[:32] + damaged[40:] != good[:32] + good[40:]
    refusal = None
    try:
        vlkv.check_header(vlkv.parse_header(damaged), vlkv.file_bytes(geometry, 33), geometry)
    except SnapshotRejected as error:
        refusal = error
    assert (refusal is not None) == changed
    assert refusal is None or refusal.reason in EXIT_CODES


@pytest.mark.parametrize(
    ("geometry", "n_tokens", "reason"),
    [
        (KvGeometry(257, 2, 4), 1, "out_of_bounds:n_layers"),
        (KvGeometry(3, 257, 4), 1, "out_of_bounds:nkv"),
        (KvGeometry(3, 2, 1025), 1, "out_of_bounds:hd"),
        (KvGeometry(3, 2, 4, 33), 1, "out_of_bounds:kv_bs"),
        (KvGeometry(1, 1, 1), vlkv.MAX_TOKENS + 1, "out_of_bounds:file_n_tokens"),
    ],
)
def test_claims_are_bounded_when_no_model_is_at_hand(geometry: KvGeometry, n_tokens: int, reason: str) -> None:
    header = vlkv.parse_header(vlkv.build_header(geometry, n_tokens, 0))
    with pytest.raises(SnapshotRejected) as caught:
        vlkv.check_header(header, vlkv.file_bytes(geometry, n_tokens), None)
    assert caught.value.reason == reason


def test_every_refusal_has_an_exit_code_of_its_own() -> None:
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES)
    assert all(
        3 <= code <= 39 or 50 <= code <= 69 for code in EXIT_CODES.values()
    )  # 1 error, 2 usage, 40-49 no refusals


@given(st.integers(1, 200), st.integers(1, 200), st.sampled_from(vlkv.BLOCK_SIZES), st.integers(1, 5))
def test_segments_are_the_rows_of_the_file_block_by_block(
    n_tokens: int, n_rows: int, block: int, n_blocks: int
) -> None:
    geometry, layer = KvGeometry(3, 1, 2, block), 2
    n_rows = min(n_rows, n_tokens)
    found = list(vlkv.segments(geometry, n_tokens, n_rows, layer, n_blocks * block))
    assert [row for part in found for row in range(part.start, part.stop)] == list(range(n_rows))
    row_bytes = 4 * geometry.kv_dim
    for part in found:
        assert part.start % block == 0
        assert part.stop - part.start <= n_blocks * block
        assert part.offset == 64 + 4 * n_tokens + (layer * n_tokens + part.start) * 2 * row_bytes
        assert part.n_in_block == min(block, n_tokens - (part.stop - 1) // block * block)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40))
def test_the_hash_is_fnv_1a(ids):
    value = vlkv.FNV_BASIS
    for byte in np.array(ids, "<i4").tobytes():
        value = (value ^ byte) * vlkv.FNV_PRIME % 2**64
    assert vlkv.fnv1a(np.array(ids, np.int32)) == value
