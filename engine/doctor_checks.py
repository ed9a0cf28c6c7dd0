"""What the engine finds on a machine: kernels, cores, memory, the model, and whether the bits are right here."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
from rich.filesize import decimal

from kvferry.doctor import Finding, Subject, fail, ok, warn
from kvferry.engine.available import available_memory
from kvferry.engine.cores import choose_cores
from kvferry.engine.errors import EngineError, ModelInvalid, ModelNotFound, SelfTestFailed
from kvferry.engine.files.catalogue import cache_root
from kvferry.terminal.words import say

# Features that choose a kernel path, or would if there were one for them.
_TELLING: Final = (
    "sse4.2", "avx2", "fma", "f16c", "avxvnni", "avx512f", "avx512bw", "avx512vnni", "amx-int8",
    "neon", "dotprod", "i8mm", "sve", "sve2",
)  # fmt: skip
_READ_BYTES: Final = 1 << 28
_READS: Final = 3
_BAD_BITS: Final = "this machine would spoil conversations that others began"


def engine(subject: Subject) -> Iterator[Finding]:
    """The quick ones first. Importing the kernels compiles them, where nobody has yet."""
    yield ok("cores", f"{(cores := choose_cores())}; {cores.n_threads} threads, unless told otherwise")
    yield _cache_folder()
    yield from _kernels()
    yield from _model(subject)
    if subject.quick:
        return
    yield ok("memory read by one thread", f"{read_bandwidth() / 1e9:.1f} GB/s")
    from kvferry.engine.selftest import self_test

    for n_threads in (1, 2):
        name = f"golden bits, {n_threads} thread{'s' if n_threads > 1 else ''}"
        yield _timed(name, lambda n=n_threads: self_test(n))  # type: ignore[misc]


def _cache_folder() -> Finding:
    root = cache_root()
    nearest = next((path for path in (root, *root.parents) if path.exists()), root)
    if os.access(nearest, os.W_OK | os.X_OK):
        return ok("cache", f"{root} can be written")
    means = "kernels are compiled again at every start, for up to a minute, and no model can be fetched"
    return warn("cache", f"{root} cannot be written", means=means, advice="set KVFERRY_CACHE to a folder that can be")


def _kernels() -> Iterator[Finding]:
    from kvferry.engine.kernels.compile_cache import cached_kernels, compile_cache
    from kvferry.engine.kernels.cpu_features import host_features

    was_there = cached_kernels() is not None
    if not was_there:
        say("compiling kernels for this processor, for up to a minute", err=True)
    from kvferry.engine.kernels.intrinsics import ISA

    present = [name for name in _TELLING if name in host_features()]
    found = f"{ISA.name}, on {platform.machine()} with {', '.join(present) or 'nothing that matters'}"
    if ISA.name == "generic":
        means = "answers are right, and several times slower than this machine could"
        yield warn("kernel path", found, means=means, advice="unset KVFERRY_KERNEL_PATH, or use a newer processor")
    else:
        yield ok("kernel path", found)
    cache = compile_cache()
    if cache.is_warm:
        said = "were there and whole" if was_there else "have just been compiled, and are there from now on"
        yield ok("compiled kernels", f"{said} ({cache.folder})")
    else:
        means = "each process compiles for itself, for up to a minute"
        advice = f"look why {cache_root() / 'kernels'} cannot be written; the line above says what went wrong"
        yield warn("compiled kernels", f"for this process alone ({cache.folder})", means=means, advice=advice)


def _model(subject: Subject) -> Iterator[Finding]:
    available = available_memory()
    if subject.model is None:
        yield ok("memory", f"{decimal(available)} available; --model says whether one fits")
        return
    from kvferry.engine.files.fetch import verify_model
    from kvferry.engine.files.open_model import open_model
    from kvferry.engine.files.resolve import resolve_model
    from kvferry.engine.weights import memory_needed

    try:
        file = open_model(resolve_model(subject.model))
        needed = memory_needed(file, "q8", subject.kv_bytes)
    except EngineError as error:
        yield fail("model", subject.model, means=str(error).rstrip("."), advice="kvferry models list")
        return
    yield _fits(needed, available, subject.kv_bytes)
    if subject.quick:
        yield ok("model", str(file.path))
        return
    try:
        record = verify_model(subject.model)
        yield ok("model", f"{record.path}: every byte is as it was fetched")
    except ModelNotFound:
        yield ok("model", f"{file.path}: not fetched by us, so there is no hash to compare with")
    except ModelInvalid as error:
        yield fail("model", subject.model, means=str(error).rstrip("."), advice=f"kvferry models fetch {subject.model}")


def _fits(needed: int, available: int, kv_bytes: int) -> Finding:
    from kvferry.engine.weights import choose

    mode, reason = choose("auto", needed, available)
    found = f"{reason}, {decimal(kv_bytes)} of it for rows: weights would lie in {mode}"
    if mode == "memory":
        return ok("memory", found)
    advice = "lower --kv-memory, use --kv f16 or --quant q4, or another board"
    if mode == "mmap":
        return warn("memory", found, means="little is left for anything else", advice=advice)
    return warn("memory", found, means="weights are read from the disk for each token", advice=advice)


def read_bandwidth() -> float:
    """Bytes per second that one thread reads, by the best of a few passes over more than a cache holds."""
    data = np.ones(_READ_BYTES // 8, np.uint64)
    best = float("inf")
    for _ in range(_READS):
        started_at = time.thread_time()
        np.bitwise_or.reduce(data)
        best = min(best, time.thread_time() - started_at)
    return _READ_BYTES / best


def _timed(name: str, test: Callable[[], None]) -> Finding:
    started_at = time.monotonic()
    try:
        test()
    except SelfTestFailed as error:
        return fail(name, str(error), means=_BAD_BITS, advice="do not serve with this machine; look at its memory")
    return ok(name, f"as they should be ({time.monotonic() - started_at:.1f} s)")
