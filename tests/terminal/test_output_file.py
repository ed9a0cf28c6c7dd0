"""What a person names for a result is written, and what is more than a file there stays what it is."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvferry.terminal.output_file import output_file

SAY = """
import sys
from pathlib import Path
from kvferry.terminal.output_file import is_stdout, output_file
path = Path(sys.argv[1])
print("before", flush=True)
with output_file(path, 0o640) as file:
    file.write(b"result")
print("told aside", file=sys.stderr) if is_stdout(path) else print("told here")
"""


def write(path: Path, data: bytes = b"new", mode: int = 0o640) -> None:
    with output_file(path, mode) as file:
        file.write(data)


def stop_half_way(path: Path) -> None:
    with output_file(path, 0o640) as file:
        file.write(b"half")
        raise KeyboardInterrupt


def test_a_file_is_replaced_whole_and_has_the_mode_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for data in (b"first", b"second"):
        write(path, data)
        assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (data, 0o640)
    with pytest.raises(KeyboardInterrupt):
        stop_half_way(path)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("x", b"second")]


def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for number in range(2):  # the first time it points to nothing yet
        link = tmp_path / "link"
        if not number:
            link.symlink_to("there/target")
        write(link, f"{number}".encode())
        assert link.is_symlink()
        assert (tmp_path / "there" / "target").read_text() == f"{number}"


def test_a_pipe_is_written_into(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link):
        read: list[bytes] = []
        reader = threading.Thread(target=lambda read=read: read.append(pipe.read_bytes()), daemon=True)
        reader.start()
        write(path)
        reader.join(10)
        assert (read, pipe.is_fifo(), link.is_symlink()) == ([b"new"], True, True)


@pytest.mark.parametrize(("minor", "refusal"), [(3, None), (7, "No space left")], ids=["null", "full"])
def test_a_device_stays_and_its_refusal_is_told(tmp_path: Path, minor: int, refusal: str | None) -> None:
    node = tmp_path / "node"
    try:
        os.mknod(node, 0o600 | stat.S_IFCHR, os.makedev(1, minor))
        os.close(os.open(node, os.O_RDONLY))
    except PermissionError:
        pytest.skip("devices may not be made or opened here")
    if refusal is None:
        write(node)
    else:
        with pytest.raises(OSError, match=refusal):
            write(node)
    assert stat.S_ISCHR(node.stat().st_mode)
    assert list(tmp_path.iterdir()) == [node]


def test_standard_output_gets_the_result_and_other_words_go_aside(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("/proc/self/fd/1")
    into_pipe = subprocess.run([sys.executable, "-c", SAY, link], capture_output=True, text=True, check=True)
    assert (into_pipe.stdout, into_pipe.stderr) == ("before\nresult", "told aside\n")
    out = tmp_path / "out"
    with out.open("w") as file:
        subprocess.run([sys.executable, "-c", SAY, link], stdout=file, check=True)
    assert out.read_text() == "before\nresult"
    assert link.is_symlink()


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        write(tmp_path)
