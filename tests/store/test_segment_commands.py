"""`kvferry kv` of single version 3 files: under another name, and without what they continue."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from kvferry.store.cli import kv
from kvferry.store.errors import EXIT_CODES
from kvferry.store.geometry import KvGeometry
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.snapshot_store import SnapshotStore

GEOMETRY = KvGeometry(1, 1, 4)
IDS = np.arange(1, 201, dtype=np.int32)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(kv, [str(argument) for argument in arguments])


@pytest.fixture
def chain(tmp_path: Path) -> tuple[Path, Path]:
    """A segment from token 0 on, and the one that continues it."""
    store = SnapshotStore(tmp_path, "feed", GEOMETRY, 1024, 1 << 30, 10, "node-1", version=3)
    names = [store.publish(IDS[:n], MemoryRows.empty(GEOMETRY, n)).name for n in (100, 200)]
    return store.path / names[0], store.path / names[1]


@pytest.mark.parametrize("command", ["verify", "inspect", "dump", "diff"])
@pytest.mark.parametrize("name", ["copy-of-{}", "x"])
def test_a_whole_segment_under_another_name_is_refused_for_its_name(
    chain: tuple[Path, Path], tmp_path: Path, command: str, name: str
) -> None:
    segment = chain[0]
    copy = tmp_path / name.format(segment.name)
    shutil.copy(segment, copy)
    more = {"dump": ["--output", tmp_path / "out"], "diff": [segment]}.get(command, [])
    result = run(command, copy, *more)
    told = str(result.exception) + result.output
    assert f"it is named {copy.name}, its digests call for {segment.name}" in told
    code = getattr(result.exception, "exit_code", result.exit_code)
    assert (code, "version 1" in told) == (EXIT_CODES["filename_hash_mismatch"], False)


def test_verify_says_that_what_a_segment_continues_is_not_there(chain: tuple[Path, Path]) -> None:
    parent, child = chain
    assert run("verify", child).output == f"ok: {child}, 100 tokens\n"
    assert json.loads(run("verify", child, "--json").output)["n_tokens_missing_before"] == 0
    parent.unlink()
    result = run("verify", child)
    assert result.exit_code == 0, "the file itself is good"
    assert "and what comes before is not there" in result.output
    assert json.loads(run("verify", child, "--json").output)["n_tokens_missing_before"] > 0
