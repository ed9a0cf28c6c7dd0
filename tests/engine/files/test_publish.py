"""What a killed writer leaves does not stay, and what a living one writes does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from kvferry.engine.files.publish import TEMP_PREFIX, published, reap_leftovers

WRITER = """
import sys, time
from pathlib import Path
from kvferry.engine.files.publish import published
with published(Path(sys.argv[1])) as out:
    out.write(bytes(1000))
    out.flush()
    print("writing", flush=True)
    time.sleep(60)
"""


def test_what_a_killed_writer_left_goes_at_once_where_writers_lock_their_files(tmp_path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "final")], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    with writer.stdout:
        assert writer.stdout.readline() == b"writing\n"
        soon_s = time.time() + 60
        assert reap_leftovers(tmp_path, now_s=soon_s, locked_by_writers=True) == 0, "it lives"
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
    assert reap_leftovers(tmp_path, now_s=soon_s) == 0, "writers that do not lock may be at work for hours"
    assert reap_leftovers(tmp_path, now_s=soon_s, locked_by_writers=True) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_was_just_made_stays_until_its_writer_can_have_locked_it(tmp_path: Path) -> None:
    (tmp_path / f"{TEMP_PREFIX}new").touch()
    assert reap_leftovers(tmp_path, locked_by_writers=True) == 0


def test_a_reaper_takes_nothing_from_a_writer(tmp_path: Path) -> None:
    with published(tmp_path / "final") as out:
        out.write(b"whole")
        assert reap_leftovers(tmp_path, now_s=time.time() + 60, locked_by_writers=True) == 0
    assert (tmp_path / "final").read_bytes() == b"whole"
