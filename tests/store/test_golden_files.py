"""Files of another writer: the good ones are read to the same rows and written to the same bytes, the bad ones
refused for their reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.store.errors import EXIT_CODES, SnapshotRejected
from kvferry.store.fs import PosixFileSystem
from kvferry.store.geometry import KvGeometry, TokenIds
from kvferry.store.inspection import judge, load_snapshot
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.reader import open_snapshot
from kvferry.store.snapshot_store import SnapshotStore

GOLDEN = Path(__file__).parents[1] / "golden" / "vlkv"
MANIFEST: dict[str, Any] = json.loads((GOLDEN / "manifest.json").read_text())
VOCAB = MANIFEST["vocab"]
GOOD = [case["file"] for case in MANIFEST["good"]]
REFUSED = [case for case in MANIFEST["malformed"] if case["expect"] == "refuse"]
UNDETECTABLE = [case for case in MANIFEST["malformed"] if case["expect"] == "accept_undetectable"]


def _store_of(tmp_path: Path, geometry: KvGeometry, *files: Path) -> SnapshotStore:
    """A store in which another program has left these files."""
    store = SnapshotStore(tmp_path, "feed", geometry, VOCAB, 1 << 30, 100, "node-1")
    store.reap()
    for file in files:
        shutil.copy(file, store.path / file.name)
    return store


@pytest.mark.parametrize("file", GOOD)
def test_a_good_file_is_read_to_the_oracles_rows(
    file: str, golden_geometry: KvGeometry, golden_rows: MemoryRows, golden_ids: TokenIds
) -> None:
    snapshot = load_snapshot(PosixFileSystem(), GOLDEN / file, golden_geometry, VOCAB)
    n = len(snapshot.token_ids)
    assert np.array_equal(snapshot.token_ids, golden_ids[:n])
    assert snapshot.k.tobytes() == golden_rows.k[:, :n].tobytes()
    assert snapshot.v.tobytes() == golden_rows.v[:, :n].tobytes()


@pytest.mark.parametrize("file", GOOD)
def test_a_good_file_is_written_to_the_same_bytes(
    file: str, tmp_path: Path, golden_geometry: KvGeometry, golden_rows: MemoryRows, golden_ids: TokenIds
) -> None:
    wanted = (GOLDEN / file).read_bytes()
    n_tokens = int.from_bytes(wanted[24:28], "little")
    store = _store_of(tmp_path, golden_geometry)
    info = store.publish(golden_ids[:n_tokens], golden_rows)
    assert info.name == Path(file).name
    assert info.n_bytes == len(wanted)
    assert (store.path / info.name).read_bytes() == wanted


@pytest.mark.parametrize("case", MANIFEST["partial_restore"], ids=lambda case: f"{case['n_take']} rows")
def test_part_of_a_good_file_is_read_to_the_oracles_rows(
    case: dict[str, Any], golden_geometry: KvGeometry, golden_rows: MemoryRows
) -> None:
    n = case["n_take"]
    rows = MemoryRows.empty(golden_geometry, n)
    with open_snapshot(PosixFileSystem(), GOLDEN / case["file"], golden_geometry) as snapshot:
        snapshot.restore(n, rows)
    assert rows.k.tobytes() == golden_rows.k[:, :n].tobytes()
    assert rows.v.tobytes() == golden_rows.v[:, :n].tobytes()


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case["tag"])
def test_a_malformed_file_is_refused_for_the_manifests_reason(
    case: dict[str, Any], golden_geometry: KvGeometry
) -> None:
    refusal = judge(PosixFileSystem(), GOLDEN / case["file"], golden_geometry, VOCAB, versions=(1,))
    assert refusal is not None
    assert f"refuse:{refusal.reason}" == case["reference_reader"]
    assert refusal.exit_code == EXIT_CODES[refusal.reason]
    assert case["file"] in str(refusal)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case["tag"])
def test_a_malformed_file_in_a_store_is_never_restored_and_left_as_it_is(
    case: dict[str, Any], tmp_path: Path, golden_geometry: KvGeometry, golden_ids: TokenIds
) -> None:
    """It may pass the look from outside (the hash is computed when rows are asked for), but no row of it arrives."""
    source = GOLDEN / case["file"]
    store = _store_of(tmp_path, golden_geometry, source)
    store.refresh()
    for first_id in (int(golden_ids[0]), -1):
        request = golden_ids.copy()
        request[0] = first_id
        match = store.find(request, min_tokens=1)
        if match is not None:
            rows = MemoryRows.empty(golden_geometry, match.n_common)
            rows.k[:] = rows.v[:] = 7
            with pytest.raises(SnapshotRejected):
                store.restore(match, match.n_common, rows)
            assert (rows.k == 7).all()
            assert (rows.v == 7).all()
            assert store.find(request, min_tokens=1) is None
    assert f"refuse:{store.refused()[source.name]}" == case["reference_reader"]
    assert store.refresh().added == ()
    assert (store.path / source.name).read_bytes() == source.read_bytes()


@pytest.mark.parametrize("case", UNDETECTABLE, ids=lambda case: case["tag"])
def test_damage_that_version_1_cannot_notice_is_read_as_it_stands(
    case: dict[str, Any], golden_geometry: KvGeometry
) -> None:
    data = (GOLDEN / case["file"]).read_bytes()
    snapshot = load_snapshot(PosixFileSystem(), GOLDEN / case["file"], golden_geometry, VOCAB)
    first_block = snapshot.k[0, :32].tobytes() + snapshot.v[0, :32].tobytes()
    assert first_block == data[64 + 4 * 33 :][: len(first_block)]


@pytest.mark.parametrize("case", MANIFEST["lookups"], ids=lambda case: case["tag"])
def test_the_longest_common_prefix_is_the_manifests(
    case: dict[str, Any], tmp_path: Path, golden_geometry: KvGeometry
) -> None:
    store = _store_of(tmp_path, golden_geometry, *(GOLDEN / file for file in GOOD))
    assert store.refresh().n_known == len(GOOD)
    match = store.find(case["request_ids"], min_tokens=1)
    if case["best_lcp"] == 0:
        assert match is None
    else:
        assert match is not None
        assert (match.n_common, match.name) == (case["best_lcp"], case["shortest_file_with_that_lcp"])
        assert min(match.n_common, len(case["request_ids"]) - 1) == case["rows_usable"]
