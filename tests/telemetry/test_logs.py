"""Logs for machines: one JSON object a line, with ids and nothing else as fields."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from kvferry.telemetry.logs import configure_logs, log_with

log = logging.getLogger("kvferry.node.example")


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What is logged as JSON; the root logger is as it was afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure_logs("info", "json", stream, node_id="board-1")
    yield stream
    root.handlers[:], root.level = handlers, level


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_says_when_how_bad_where_and_what(written: io.StringIO) -> None:
    log.warning("%d rows\nare recomputed", 5)
    log.debug("not asked for")
    (line,) = lines(written)
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "warning", "logger": "kvferry.node.example", "message": "5 rows\nare recomputed", "node_id": "board-1",
    }  # fmt: skip


def test_an_error_has_its_traceback_in_the_same_line(written: io.StringIO) -> None:
    try:
        int("of no use")
    except ValueError:
        log.exception("a bug")
    assert lines(written)[0]["exception"].endswith("invalid literal for int() with base 10: 'of no use'")


async def test_each_task_and_each_thread_has_its_own_fields(written: io.StringIO) -> None:
    async def turn(name: str) -> None:
        log_with(session_id=name, turn_id="t", epoch=1)
        await asyncio.sleep(0)
        log_with(epoch=2)
        log.info("placed")

    await asyncio.gather(turn("a"), turn("b"))
    thread = threading.Thread(target=lambda: log.info("of no turn"))
    thread.start()
    thread.join()
    log.info("neither", extra={"session_id": "c", "node_id": ""})
    fields = [[line.get(name) for name in ("session_id", "turn_id", "epoch", "node_id")] for line in lines(written)]
    assert sorted(fields, key=str) == sorted(
        [["a", "t", 2, "board-1"], ["b", "t", 2, "board-1"], [None, None, None, "board-1"], ["c", None, None, None]],
        key=str,
    )


def test_only_ids_can_be_fields() -> None:
    with pytest.raises(ValueError, match="prompt"):
        log_with(prompt="what somebody wrote")


@pytest.mark.parametrize("under_systemd", [True, False])
def test_the_default_is_json_where_standard_error_is_the_journal(under_systemd: bool) -> None:
    script = (
        "import os, logging; from kvferry.telemetry.logs import configure_logs; s = os.fstat(2);"
        f"os.environ['JOURNAL_STREAM'] = f'{{s.st_dev}}:{{s.st_ino if {under_systemd} else 0}}';"
        "configure_logs('info'); logging.getLogger('x').info('hello')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert ended.stderr.startswith("{") == under_systemd
    assert "hello" in ended.stderr


def test_a_text_log_shows_control_characters_and_does_not_send_them() -> None:
    stream = io.StringIO()
    configure_logs("info", "text", stream)
    logging.getLogger("x").info("the model %s", "a\x1b]0;b\x07")
    assert stream.getvalue().endswith(r"the model a\x1b]0;b\x07" + "\n")
