"""Compiled kernels on disk: verified before they are used, compiled by one process at a time, never half there.

Numba's own cache trusts its files: a torn index raises at start, for ever, and a flipped byte in machine code goes
unnoticed. So kernels are compiled in a child process (warm_up.py) into a new folder, which is published by writing a
manifest with the SHA-256 of every file, in one atomic replacement. A process uses a published folder only when every
file in the manifest is what it was; otherwise a child makes a new one, from those files that are whole and by compiling
the others, and processes that start meanwhile wait for it. Nothing is ever repaired in place. Where the child fails,
the process compiles for itself, in a folder that it removes. `n_damaged` counts what had to be made anew.

Compiled code is trusted like the program: files of another user, and folders that others may write, are not used.

Kernels that few models need are a part of their own, compiled and published when a model first asks for them.

Manifests are named by a digest of everything the machine code depends on: the kernels' sources, the compilers'
versions, the processor and the kernel path. An edit, another compiler or another board gets a cache of its
own; another clone, or a release with the same kernels, does not.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO, TypedDict

import numba
from llvmlite import binding

from kvferry.engine.files.catalogue import cache_root
from kvferry.engine.files.digest import file_sha256
from kvferry.engine.kernels.cache_locator import CONTENT_LOCATOR
from kvferry.engine.kernels.instruction_sets import host_instruction_set

# An unpublished folder may belong to a process that is compiling just now; after a day it does not.
_ABANDONED_AFTER_SECONDS: Final = 86_400
# The parts: what every process needs, and what only models with q5 or K-quant weights do.
ALWAYS: Final = "always"
MORE_KINDS: Final = "more-kinds"

_COMPILING_CHILD: Final = "KVFERRY_COMPILING_CHILD"  # set for the process that compiles for others

_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH

_log = logging.getLogger(__name__)
_damaged: list[str] = []  # what was wrong, of each part that this process found so


class _Manifest(TypedDict):
    folder: str  # name of the folder beside the manifest
    files: dict[str, str]  # SHA-256 by path in the folder


class CompileCache:
    """The folder that this process loads compiled kernels from and compiles them into."""

    def __init__(self, root: Path, key: str, part: str = ALWAYS) -> None:
        self._root = root
        self._part = part
        self._key = key if part == ALWAYS else f"{key}-{part}"
        self._manifest = root / f"{self._key}.json"
        self._whole: list[tuple[str, Path]] = []  # of a damaged folder
        self.damage = ""  # of what was published before, in words
        published = self._verified()
        if published is None and not _is_compiling_child():
            published = self._compile_in_child()
        self.is_warm: Final = published is not None
        self.folder: Final = self._writable(published) if published else self._new_folder()
        if self.damage and not _is_compiling_child():
            _damaged.append(self.damage)
            _log.warning("compiled kernels in %s were damaged and are made anew: %s", root, self.damage)

    def publish(self) -> None:
        """Let other processes use what is in the folder by now, if it lies where they look."""
        if self.folder.parent != self._root:
            return
        body = {
            "folder": self.folder.name,
            "files": {name: file_sha256(path) for name, path in _compiled_files(self.folder)},
        }
        staged = self._manifest.with_suffix(f".{secrets.token_hex(4)}.tmp")
        staged.write_text(json.dumps(body))
        if self._manifest.is_dir():
            _clear(self._manifest)
        staged.replace(self._manifest)
        atexit.unregister(self._discard)
        self._remove_abandoned()

    def _compile_in_child(self) -> Path | None:
        """Have a child compile and publish, unless another process has just done so; None when that fails."""
        try:
            self._make_root()
            with self._open_lock() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # released by the kernel if this process dies
                published = self._verified()
                if published is None:
                    environment = os.environ | {_COMPILING_CHILD: "1"}
                    command = [sys.executable, "-m", "kvferry.engine.kernels.warm_up", self._part]
                    subprocess.run(command, env=environment, check=True, stdin=subprocess.DEVNULL, timeout=600)
                    published = self._verified()
                return published
        except (OSError, subprocess.SubprocessError) as error:
            _log.warning("kernels could not be compiled ahead of time (%s); this process compiles for itself", error)
            return None

    def _verified(self) -> Path | None:
        """The published folder, if it may be used; what is wrong with it is remembered."""
        found = _look(self._root, self._manifest)
        if found.damage:
            self.damage, self._whole = found.damage, found.whole
        return found.folder

    def _make_root(self) -> None:
        """Raises OSError when others could put their code into it, or we cannot put ours."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self._root.stat()
        if found.st_uid == os.geteuid():
            self._root.chmod(0o700)
            if found.st_mode & _OTHERS_MAY_WRITE:
                for path in self._root.glob("*.json"):  # whatever they say may be others' word
                    _clear(path)
        _check_folder(self._root)

    def _open_lock(self) -> TextIO:
        path = self._root / f"{self._key}.lock"
        try:
            return path.open("w")
        except OSError:  # another user's, or no file
            _clear(path)
            return path.open("w")

    def _new_folder(self) -> Path:
        """Empty, but for what is whole of a damaged one."""
        try:
            self._make_root()
            folder = Path(tempfile.mkdtemp(prefix=f"{self._key}-", dir=self._root))
        except OSError:  # a read-only home
            folder = Path(tempfile.mkdtemp(prefix="kvferry-kernels-"))
        atexit.register(self._discard)
        for name, path in self._whole:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)
        return folder

    def _discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _writable(self, folder: Path) -> Path:
        """The folder, or a copy: numba reads only from where it may write."""
        try:
            for path in (folder, *(entry for entry in folder.iterdir() if entry.is_dir())):
                if not os.access(path, os.W_OK | os.X_OK):
                    self.damage = f"{path.name} is read-only"
                    path.chmod(0o700)
        except OSError:
            self._whole = [(name, folder / name) for name, _ in _compiled_files(folder)]
            return self._new_folder()
        return folder

    def _remove_abandoned(self) -> None:
        """Delete folders that no manifest names and no process can be working in."""
        named = {self.folder.name}
        for path in self._root.glob("*.json"):
            with suppress(OSError, ValueError, KeyError, TypeError):  # a damaged one names nothing
                named.add(json.loads(path.read_text())["folder"])
        limit = time.time() - _ABANDONED_AFTER_SECONDS
        for folder in self._root.iterdir():
            if folder.is_dir() and folder.name not in named and folder.stat().st_mtime < limit:
                shutil.rmtree(folder, ignore_errors=True)


def cached_kernels(part: str = ALWAYS) -> Path | None:
    """The folder of a part that is there and whole, without compiling anything."""
    key = _key() if part == ALWAYS else f"{_key()}-{part}"
    root = cache_root() / "kernels"
    return _look(root, root / f"{key}.json").folder


def n_damaged() -> int:
    """Parts whose published files this process could not use, and had made anew."""
    return len(_damaged)


class _Found(NamedTuple):
    """What was published: the folder if it may be used, else what is wrong in words, and which files are whole."""

    folder: Path | None
    damage: str = ""
    whole: list[tuple[str, Path]] = []  # noqa: RUF012 - never changed


def _look(root: Path, manifest_path: Path) -> _Found:
    """Compare every published file with what it was when it was published."""
    try:
        manifest_path.lstat()
    except FileNotFoundError:
        return _Found(None)  # nothing was
    except OSError as error:
        return _Found(None, f"{manifest_path.name} cannot be looked at: {error}")
    try:
        _check_folder(root)
        _check_owner(manifest_path)
        manifest: _Manifest = json.loads(manifest_path.read_text())
        folder = root / Path(manifest["folder"]).name
        _check_owner(folder)
        files = [(name, folder / name, digest) for name, digest in manifest["files"].items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return _Found(None, f"{manifest_path.name}: {error or type(error).__name__}")
    wrong = {name: reason for name, path, digest in files if (reason := _why_not(path, digest))}
    if not wrong and files:
        return _Found(folder)
    name, reason = next(iter(wrong.items()), (manifest_path.name, "names no file"))
    whole = [(name, path) for name, path, _ in files if name not in wrong and ".." not in path.parts]
    return _Found(None, f"{len(wrong)} of {len(files)} files, {name}: {reason}", whole)


def _compiled_files(folder: Path) -> list[tuple[str, Path]]:
    """Names in the folder, and paths."""
    # Numba's own temporary files end otherwise.
    found = [path for suffix in ("nbi", "nbc") for path in folder.rglob(f"*.{suffix}")]
    return sorted((str(path.relative_to(folder)), path) for path in found)


def _why_not(path: Path, digest: str) -> str:
    """Why a published file may not be used; empty when it may."""
    try:
        _check_owner(path)
        return "" if file_sha256(path) == digest else "other bytes than were published"
    except (OSError, TypeError) as error:
        return str(error)


def _check_owner(path: Path) -> None:
    """Raises PermissionError for another user's: what lies in such a file is run."""
    owner = path.lstat().st_uid
    if owner not in (os.geteuid(), 0):
        raise PermissionError(f"it belongs to user {owner}")


def _check_folder(path: Path) -> None:
    """Raises PermissionError when others own the folder or may write into it."""
    found = path.stat()
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & _OTHERS_MAY_WRITE:
        raise PermissionError(f"{path} is user {found.st_uid}'s, or others may write into it")


def _clear(path: Path) -> None:
    """Make room for a file."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _is_compiling_child() -> bool:
    return _COMPILING_CHILD in os.environ


def compile_cache(part: str = ALWAYS) -> CompileCache:
    """This process's cache of a part, under the user's cache directory (or $KVFERRY_CACHE)."""
    return _compile_cache(part)


@cache
def _compile_cache(part: str) -> CompileCache:
    return CompileCache(cache_root() / "kernels", _key(), part)


@contextmanager
def numba_caching_here(part: str = ALWAYS) -> Iterator[None]:
    """Functions jitted inside keep their compiled code in ``compile_cache(part).folder``."""
    config: Any = numba.config
    before = config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES
    config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES = str(compile_cache(part).folder), CONTENT_LOCATOR
    try:
        yield
    finally:
        config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES = before


def _key() -> str:
    """A digest of all that the machine code depends on; a release whose kernels are the last one's takes theirs."""
    digest = hashlib.blake2b(digest_size=8)
    facts = [*(f"{package} {version(package)}" for package in ("numba", "llvmlite", "numpy")), sys.version]
    facts += [binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten(), host_instruction_set().name]
    facts += sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith("NUMBA_") and name != "NUMBA_CACHE_DIR"
    )
    for path in sorted(Path(__file__).parent.glob("*.py")):
        facts.append(f"{path.name} {file_sha256(path)}")
    for fact in facts:
        digest.update(fact.encode() + b"\0")
    return digest.hexdigest()


if __name__ == "__main__":  # for who wants to see the progress: the child has the standard error of the terminal
    compile_cache()
