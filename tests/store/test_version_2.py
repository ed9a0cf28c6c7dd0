"""Version 2, q8: files of another writer are read to the same int8 rows and scales, written to the same bytes, and
refused for what a q8 file can have wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

from kvferry.store import vlkv
from kvferry.store.cli import kv
from kvferry.store.errors import EXIT_CODES, SnapshotRejected
from kvferry.store.faults import FaultyFileSystem
from kvferry.store.fs import PosixFileSystem
from kvferry.store.geometry import KvGeometry, TokenIds
from kvferry.store.inspection import Q8Snapshot, judge, load_any
from kvferry.store.publish import create_temp, write_q8_snapshot
from kvferry.store.q8 import Q8Rows, dequantise, quantise
from kvferry.store.reader import open_snapshot

GOLDEN = Path(__file__).parents[1] / "golden" / "vlkv_v2"
MANIFEST: dict[str, Any] = json.loads((GOLDEN / "manifest.json").read_text())
GEOMETRY = KvGeometry(3, 2, 64)
ARRAYS = load_file(GOLDEN / "rows.safetensors")
ROWS = Q8Rows(ARRAYS["k_q8"], ARRAYS["v_q8"], ARRAYS["k_scale"], ARRAYS["v_scale"])
IDS: TokenIds = np.array(MANIFEST["token_ids"], np.int32)
GOOD = [case["file"] for case in MANIFEST["good"]]
VERSIONS = (2,)


def _assert_rows(rows: Q8Rows, n: int) -> None:
    assert rows.k.tobytes() == ROWS.k[:, :n].tobytes()
    assert rows.v.tobytes() == ROWS.v[:, :n].tobytes()
    assert rows.k_scale.tobytes() == ROWS.k_scale[:, :n].tobytes()
    assert rows.v_scale.tobytes() == ROWS.v_scale[:, :n].tobytes()


@pytest.mark.parametrize("file", GOOD)
def test_a_good_file_is_read_to_the_oracles_rows(file: str) -> None:
    snapshot = load_any(PosixFileSystem(), GOLDEN / file, GEOMETRY, 1024)
    assert isinstance(snapshot, Q8Snapshot)
    n = len(snapshot.token_ids)
    assert np.array_equal(snapshot.token_ids, IDS[:n])
    _assert_rows(snapshot.rows, n)


@pytest.mark.parametrize("max_io_bytes", [None, 7])
@pytest.mark.parametrize("file", GOOD)
def test_a_good_file_is_written_to_the_same_bytes(file: str, max_io_bytes: int | None, tmp_path: Path) -> None:
    wanted = (GOLDEN / file).read_bytes()
    n = int.from_bytes(wanted[24:28], "little")
    fs = FaultyFileSystem(max_io_bytes=max_io_bytes)
    with create_temp(fs, tmp_path / "new") as temp:
        write_q8_snapshot(temp, GEOMETRY, IDS[:n], vlkv.fnv1a(IDS[:n]), ROWS)
        assert (tmp_path / "new").read_bytes() == wanted


@pytest.mark.parametrize("case", MANIFEST["partial_restore"], ids=lambda case: f"{case['n_take']} rows")
def test_part_of_a_file_is_read_to_the_oracles_rows_of_every_layer(case: dict[str, Any]) -> None:
    """The reference reader skips too little after a partial layer; every later layer tells."""
    rows = Q8Rows.empty(GEOMETRY, case["n_take"])
    with open_snapshot(PosixFileSystem(), GOLDEN / case["file"], GEOMETRY, versions=VERSIONS) as snapshot:
        snapshot.restore(case["n_take"], rows)
    _assert_rows(rows, case["n_take"])


@pytest.mark.parametrize("case", MANIFEST["malformed"], ids=lambda case: case["tag"])
def test_a_malformed_file_is_refused(case: dict[str, Any]) -> None:
    with pytest.raises(SnapshotRejected) as raised:
        load_any(PosixFileSystem(), GOLDEN / case["file"], GEOMETRY, 1024)
    assert raised.value.reason == ("bad_scale" if case["tag"].startswith("scale_") else "size_mismatch")
    assert case["tag"] in str(raised.value)


def test_rows_that_every_reader_would_refuse_are_not_written(tmp_path: Path) -> None:
    bad = Q8Rows.empty(GEOMETRY, 3)
    bad.k[:], bad.v[:], bad.k_scale[:], bad.v_scale[:] = 1, 1, 1, np.inf
    with create_temp(PosixFileSystem(), tmp_path / "new") as temp, pytest.raises(SnapshotRejected, match="scale"):
        write_q8_snapshot(temp, GEOMETRY, IDS[:3], 0, bad)


def test_a_reader_that_needs_float32_rows_refuses_version_2_by_its_version() -> None:
    refusal = judge(PosixFileSystem(), GOLDEN / GOOD[0], GEOMETRY, 1024, versions=(1,))
    assert refusal is not None
    assert refusal.reason == "bad_version"


def test_the_size_is_the_formulas() -> None:
    for layers, heads, hd, per_token in ((28, 8, 128, 59_140), (36, 8, 128, 76_036), (48, 4, 128, 50_692)):
        geometry = KvGeometry(layers, heads, hd)
        assert vlkv.file_bytes(geometry, 8192, vlkv.VERSION_Q8) == 64 + 8192 * per_token


def test_quantised_rows_are_within_half_a_step() -> None:
    rows = np.random.default_rng(5).standard_normal((9, 128), np.float32)
    rows[3] = 0
    values, scales = quantise(rows, 2)
    error = np.abs(dequantise(values, scales) - rows).reshape(9, 2, 64).max(axis=-1)
    assert (error <= scales * 0.5001).all()


def test_the_command_line_inspects_verifies_and_dumps_version_2(tmp_path: Path) -> None:
    good, bad = str(GOLDEN / GOOD[-1]), str(GOLDEN / "malformed/scale_nan/kv_5fce35c90480ab16.kv")
    run = CliRunner().invoke
    assert run(kv, ["inspect", good]).exit_code == 0
    assert "59104, expected 59104" in run(kv, ["inspect", good]).output
    assert run(kv, ["verify", good, "--geometry", "3,2,64"]).exit_code == 0
    assert run(kv, ["verify", bad]).exit_code == EXIT_CODES["bad_scale"]
    output = tmp_path / "rows.safetensors"
    assert run(kv, ["dump", good, "--output", str(output)]).exit_code == 0
    dumped = load_file(output)
    assert dumped.keys() == {"token_ids", "k_q8", "v_q8", "k_scale", "v_scale"}
    assert np.array_equal(dumped.pop("token_ids"), IDS)
    assert all(np.array_equal(dumped[key], ARRAYS[key]) for key in dumped)
