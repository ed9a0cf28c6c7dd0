"""Compiled kernels on disk: verified before they are used, compiled by one process at a time, never half there.

Numba's own cache trusts its files: a torn index raises at start, for ever, and a flipped byte in machine code goes
unnoticed. So kernels are compiled in a child process (warm_up.py) into a new folder, which is published by writing a
manifest with the SHA-256 of every file, in one atomic replacement. A process uses a published folder only when every
file in the manifest is what it was; otherwise a child compiles anew, and processes that start meanwhile wait for it.
Nothing is ever repaired in place. Where the child fails, the process compiles for itself, in a folder that it removes.

Kernels that few models need are a part of their own, compiled and published when a model first asks for them.

Manifests are named by a digest of everything the machine code depends on: the kernels' sources, the compilers'
versions, the processor and the kernel path. An edit, an upgrade or another board gets a cache of its own.
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
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, TypedDict

import numba
from llvmlite import binding

from kvferry.engine.files.catalogue import cache_root
from kvferry.engine.files.digest import file_sha256
from kvferry.engine.kernels.instruction_sets import host_instruction_set

# An unpublished folder may belong to a process that is compiling just now; after a day it does not.
_ABANDONED_AFTER_SECONDS: Final = 86_400
# The parts: what every process needs, and what only models with q5 or K-quant weights do.
ALWAYS: Final = "always"
MORE_KINDS: Final = "more-kinds"

_COMPILING_CHILD: Final = "KVFERRY_COMPILING_CHILD"  # set for the process that compiles for others

_log = logging.getLogger(__name__)


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
        published = _verified(self._root, self._manifest)
        if published is None and not _is_compiling_child():
            published = self._compile_in_child()
        self.is_warm: Final = published is not None
        self.folder: Final = published or self._new_folder()

    def publish(self) -> None:
        """Let other processes use what is in the folder by now."""
        body = {"folder": self.folder.name, "files": {name: file_sha256(path) for name, path in self._files()}}
        staged = self._manifest.with_suffix(f".{secrets.token_hex(4)}.tmp")
        staged.write_text(json.dumps(body))
        staged.replace(self._manifest)
        atexit.unregister(self._discard)
        self._remove_abandoned()

    def _compile_in_child(self) -> Path | None:
        """Have a child compile and publish, unless another process has just done so; None when that fails."""
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with (self._root / f"{self._key}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # released by the kernel if this process dies
                published = _verified(self._root, self._manifest)
                if published is None:
                    environment = os.environ | {_COMPILING_CHILD: "1"}
                    command = [sys.executable, "-m", "kvferry.engine.kernels.warm_up", self._part]
                    subprocess.run(command, env=environment, check=True, stdin=subprocess.DEVNULL, timeout=600)
                    published = _verified(self._root, self._manifest)
                return published
        except (OSError, subprocess.SubprocessError) as error:
            _log.warning("kernels could not be compiled ahead of time (%s); this process compiles for itself", error)
            return None

    def _new_folder(self) -> Path:
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=f"{self._key}-", dir=self._root))
        except OSError:  # a read-only home
            folder = Path(tempfile.mkdtemp(prefix="kvferry-kernels-"))
        atexit.register(self._discard)
        return folder

    def _discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _files(self) -> list[tuple[str, Path]]:
        # Numba's own temporary files end otherwise.
        found = [path for suffix in ("nbi", "nbc") for path in self.folder.rglob(f"*.{suffix}")]
        return sorted((str(path.relative_to(self.folder)), path) for path in found)

    def _remove_abandoned(self) -> None:
        """Delete folders that no manifest names and no process can be working in."""
        named = {json.loads(path.read_text()).get("folder") for path in self._root.glob("*.json")}
        limit = time.time() - _ABANDONED_AFTER_SECONDS
        for folder in self._root.iterdir():
            if folder.is_dir() and folder.name not in named and folder.stat().st_mtime < limit:
                shutil.rmtree(folder, ignore_errors=True)


def cached_kernels(part: str = ALWAYS) -> Path | None:
    """The folder of a part that is there and whole, without compiling anything."""
    key = _key() if part == ALWAYS else f"{_key()}-{part}"
    root = cache_root() / "kernels"
    return _verified(root, root / f"{key}.json")


def _verified(root: Path, manifest_path: Path) -> Path | None:
    """The published folder, if every one of its files is what it was when it was published."""
    try:
        manifest: _Manifest = json.loads(manifest_path.read_text())
        folder = root / Path(manifest["folder"]).name
        whole = all(file_sha256(folder / name) == digest for name, digest in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return folder if whole and manifest["files"] else None


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
    before = config.CACHE_DIR
    config.CACHE_DIR = str(compile_cache(part).folder)
    try:
        yield
    finally:
        config.CACHE_DIR = before


def _key() -> str:
    """A digest of all that the machine code depends on. Numba compares modification times, so they count too."""
    digest = hashlib.blake2b(digest_size=8)
    facts = [*(f"{package} {version(package)}" for package in ("numba", "llvmlite", "numpy")), sys.version]
    facts += [binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten(), host_instruction_set().name]
    facts += sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith("NUMBA_") and name != "NUMBA_CACHE_DIR"
    )
    for path in sorted(Path(__file__).parent.glob("*.py")):
        facts.append(f"{path} {path.stat().st_mtime_ns} {file_sha256(path)}")
    for fact in facts:
        digest.update(fact.encode() + b"\0")
    return digest.hexdigest()
