"""Conversions keep every byte: version 1 to 3 and back, version 2 to 3 and back; only q4 loses bits, and says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from kvferry.store import vlkv3
from kvferry.store.cli import kv
from kvferry.store.geometry import KvGeometry
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.snapshot_store import SnapshotStore

GOLDEN = Path(__file__).parents[1] / "golden"
V1 = sorted((GOLDEN / "vlkv" / "good").glob("*.kv"))
V2 = sorted((GOLDEN / "vlkv_v2" / "good").glob("*.kv"))
GEOMETRY = KvGeometry(3, 2, 64)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(kv, [str(argument) for argument in arguments])


def converted(file: Path, output: Path, version: int, *options: str) -> Path:
    output.mkdir(exist_ok=True)
    result = run("convert", file, "--to", str(version), "--output", output, *options)
    assert result.exit_code == 0, result.output
    return Path(result.output.strip())


@pytest.mark.parametrize(("version", "file"), [(1, file) for file in V1] + [(2, file) for file in V2])
def test_to_version_3_and_back_is_the_identity(version: int, file: Path, tmp_path: Path) -> None:
    segment = converted(file, tmp_path / "three", 3, "--fingerprint", "feed")
    assert run("verify", segment).exit_code == 0
    back = converted(segment, tmp_path / "back", version)
    assert back.name == file.name
    assert back.read_bytes() == file.read_bytes()


def test_a_chain_becomes_one_version_1_file_that_equals_a_whole_save(tmp_path: Path) -> None:
    k = np.random.default_rng(1).standard_normal((3, 150, 128), np.float32)
    rows, ids = MemoryRows(k, -k), np.arange(1, 151)
    chain = SnapshotStore(tmp_path / "3", "feed", GEOMETRY, 1024, 1 << 30, 100, "n", version=3)
    whole = SnapshotStore(tmp_path / "1", "feed", GEOMETRY, 1024, 1 << 30, 100, "n")
    for n in (40, 65, 150):
        leaf = chain.publish(ids[:n], rows)
    wanted = whole.path / whole.publish(ids, rows).name
    assert converted(chain.path / leaf.name, tmp_path / "out", 1).read_bytes() == wanted.read_bytes()
    assert run("diff", chain.path / leaf.name, wanted).exit_code == 0


def test_what_a_version_cannot_hold_is_refused(tmp_path: Path) -> None:
    for file, version in ((V1[0], 2), (V2[0], 1)):
        result = run("convert", file, "--to", str(version), "--output", tmp_path)
        assert "cannot hold" in str(result.exception)
    assert "--fingerprint" in str(run("convert", V1[0], "--to", "3", "--output", tmp_path).exception)
    assert list(tmp_path.iterdir()) == []


def test_the_lossy_tier_says_so_and_is_never_mixed_into_exact_rows(tmp_path: Path) -> None:
    exact = converted(V1[-1], tmp_path / "a", 3, "--fingerprint", "feed")
    lossy = converted(exact, tmp_path / "b", 3, "--lossy-q4")
    assert lossy.stat().st_size < exact.stat().st_size / 5
    assert vlkv3.parse_extent(lossy.read_bytes(), None).kind.is_exact is False
    assert "LOSSY" in run("inspect", lossy).output
    assert run("convert", lossy, "--to", "1", "--output", tmp_path).exit_code != 0
    store = SnapshotStore(tmp_path / "store", "feed", GEOMETRY, 1024, 1 << 30, 100, "n", version=3)
    store.reap()
    shutil.copy(lossy, store.path / lossy.name)
    store.refresh()
    assert store.refused() == {lossy.name: "payload_mismatch"}


def test_diff_says_which_rows_differ(tmp_path: Path) -> None:
    k = np.zeros((3, 40, 128), np.float32)
    other = k.copy()
    other[1, 17, 3] = 0.5
    files = []
    for number, array in enumerate((k, other)):
        store = SnapshotStore(tmp_path / str(number), "feed", GEOMETRY, 1024, 1 << 30, 100, "n", version=3)
        files.append(store.path / store.publish(np.arange(1, 41), MemoryRows(array, k)).name)
    result = run("diff", *files)
    assert result.exit_code == 3
    assert "layer 1  1 of 40 rows differ, first at 17, by at most 0.5" in result.output
    facts = json.loads(run("diff", *files, "--json").output)
    assert [layer["n_rows_different"] for layer in facts["layers"]] == [0, 1, 0]
