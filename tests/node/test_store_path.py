"""A store that cannot be one: one sentence, before a model is loaded, and no talk of serving without it."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.engine.engine import Engine
from kvferry.node.config import NodeConfig
from kvferry.node.errors import StoreMisconfigured
from kvferry.node.io_threads import IoThreads
from kvferry.node.loading import load_serving
from kvferry.node.store_path import check_store, why_not_store
from kvferry.store.errors import StoreError, StoreUnavailable
from kvferry.store.place import StorePlace

from .running_node import node_command


@pytest.mark.parametrize("below", [".", "s", "s/t"])
def test_a_file_on_the_way_is_named(tmp_path: Path, below: str) -> None:
    (tmp_path / "afile").touch()
    said = why_not_store(tmp_path / "afile" / below) or ""
    assert f"{tmp_path / 'afile'} is a file where a folder is needed" in said


def test_a_folder_that_is_there_or_can_be_made_will_do(tmp_path: Path) -> None:
    assert why_not_store(tmp_path) is None
    assert why_not_store(tmp_path / "to" / "make") is None


def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    assert f"the folder {tmp_path} may not be written to" in (why_not_store(tmp_path / "s") or "")


def test_a_disk_that_hangs_does_not_hold_up_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr("kvferry.node.store_path.why_not_store", lambda _: str(go_on.wait(20)))
    started_at = time.monotonic()
    check_store(StorePlace(str(tmp_path)), 0.05)
    assert time.monotonic() - started_at < 10
    go_on.set()


def test_no_model_is_loaded_for_it(smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "afile").touch()

    def load(*_: object) -> Engine:
        raise AssertionError("loaded")

    monkeypatch.setattr(Engine, "load", load)
    config = NodeConfig.load({"model": str(smollm2_path), "store": str(tmp_path / "afile")})
    loop = asyncio.new_event_loop()
    try:
        with pytest.raises(StoreMisconfigured):
            load_serving(config, loop, "boot", "1", lambda: None)
    finally:
        loop.close()


def test_the_process_says_one_sentence(smollm2_path: Path, tmp_path: Path) -> None:
    (tmp_path / "afile").touch()
    command = node_command(smollm2_path, "--store", str(tmp_path / "afile"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: the store ")


def threads_over(reap: Callable[[], None], refresh: Callable[[], None]) -> IoThreads:
    store: Any = SimpleNamespace(reap=reap, refresh=refresh, seal_name="plain")
    nobody: Any = None
    return IoThreads(open_store=lambda _: store, new_sequence=nobody, deliver=nobody, stall_seconds=5.0)


def raises(error: StoreError) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


PASSING = StoreUnavailable("the disk is away", op="list", path="/s", recovery="retry")
FATAL = StoreUnavailable("a person has to act", op="list", path="/s", recovery="page_operator")


def test_what_stops_the_start_is_told_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with pytest.raises(StoreUnavailable, match="a person has to act"):
        threads_over(raises(FATAL), raises(PASSING)).start()
    assert not caplog.records


def test_what_may_pass_is_told_and_served_without(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    io = threads_over(raises(PASSING), raises(PASSING))
    io.start()
    assert {record.getMessage() for record in caplog.records} == {"serving without the store: the disk is away"}
    assert io.close(10)
