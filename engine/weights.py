"""Getting a model's packed weights: from the file that was packed before, which is made at the first start.

memory: read into memory of one's own, on huge pages, and every byte checked. mmap: a map of the file, shared by all
processes that have it. stream: such a map, whose pages are given back layer by layer, for models larger than memory.
The bits that are computed are the same.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from rich.filesize import decimal

from kvferry.engine.available import available_memory
from kvferry.engine.errors import OutOfResources, OutputUnwritable
from kvferry.engine.files.catalogue import cache_root
from kvferry.engine.files.digest import Progress, no_progress
from kvferry.engine.files.model_file import ModelFile
from kvferry.engine.files.publish import reap_leftovers
from kvferry.engine.kernels.linear import GROUP_ROWS
from kvferry.engine.memory import huge_empty
from kvferry.engine.packed_file import SUFFIX, PackFile, PackSpec, PackUnusable, read_head, write_pack
from kvferry.engine.packing import PackedModel, Quant, RegionSink, pack_piece, pack_pieces, plan_weights
from kvferry.engine.weight_plan import WeightPlan

_U8 = NDArray[np.uint8]

log = logging.getLogger(__name__)

WeightsMode = Literal["auto", "memory", "mmap", "stream"]
Chosen = Literal["memory", "mmap", "stream"]

# Packing this much takes a tenth of a second, so `auto` leaves no file behind for it.
SMALL_BYTES: Final = 32 << 20
# Beside weights and KV memory: the interpreter, compiled kernels, a batch's rows.
_PROCESS_BYTES: Final = 300 << 20
_COMFORTABLE: Final = 0.8  # share of the available memory that may be taken for good without a thought
# Streaming: what every step reads stays mapped up to this much, for mapping it anew at each step takes time; and up to
# a quarter of what is available.
STREAM_KEEPS: Final = 384 << 20
_SAMPLED_PIECES: Final = 256  # of a map, at a start: a quarter of a gigabyte, read in some hundredths of a second


@dataclass(frozen=True)
class LoadedWeights:
    """``how``: for a person, where they lie and why."""

    packed: PackedModel
    source_sha256: str
    mode: Chosen
    how: str


def packs_folder() -> Path:
    """Where packed files lie; it may not exist yet."""
    return cache_root() / "packed"


def pack_path(spec: PackSpec) -> Path:
    return packs_folder() / spec.file_name


def load_weights(
    file: ModelFile,
    *,
    quant: Quant,
    context_length: int,
    want: WeightsMode = "auto",
    kv_bytes: int = 0,
    progress: Progress = no_progress,
) -> LoadedWeights:
    """Raises UnsupportedArchitecture, ModelInvalid, OutOfResources for weights that cannot be held."""
    plan = plan_weights(file, quant)
    if want == "auto" and plan.n_bytes < SMALL_BYTES:
        return _packed_here(file, plan, context_length, f"memory, packed at this start: {decimal(plan.n_bytes)}")
    n_available = available_memory()
    n_needed = plan.n_bytes + kv_bytes + _PROCESS_BYTES
    mode, why = choose(want, n_needed, n_available)
    try:
        region, spec = _from_file(file, plan, mode, progress)
    except _NoPack as error:
        if n_needed > n_available:
            raise OutOfResources(
                f"the model needs {decimal(n_needed)} of memory, {decimal(n_available)} are available, and its weights "
                f"cannot be read from a packed file: {error}"
            ) from error
        log.warning("the weights are packed into memory, as at every start without a packed file: %s", error)
        return _packed_here(file, plan, context_length, f"memory, packed at this start ({error})", progress)
    streamed_beside = min(STREAM_KEEPS, n_available // 4) if mode == "stream" else None
    packed = PackedModel.at(plan, region, context_length, streamed_beside)
    how = f"{mode} ({why}): {decimal(plan.n_bytes)} of {pack_path(spec)}"
    return LoadedWeights(packed, spec.source_sha256, mode, how)


def make_pack(file: ModelFile, quant: Quant, progress: Progress = no_progress) -> PackSpec:
    """Pack a model into the cache, unless that has been done and every byte of it is right.

    Raises as ``load_weights``; OutputUnwritable where the cache cannot hold it.
    """
    plan = plan_weights(file, quant)
    with _lock(plan):
        spec = PackSpec(plan, file.weights_sha256())
        try:
            _check_whole(file, spec, progress)
        except (FileNotFoundError, PackUnusable) as error:
            if isinstance(error, PackUnusable):
                log.warning("%s; it is made anew", error)
            try:
                _write(file, spec, progress)
            except _NoPack as reason:
                raise OutputUnwritable(str(reason)) from reason
    return spec


def verify_packs(file: ModelFile, source_sha256: str, progress: Progress = no_progress) -> list[Path]:
    """Check every byte of the packed files that were made of a source. Raises PackUnusable."""
    found = []
    for quant in ("q8", "q4"):
        spec = PackSpec(plan_weights(file, quant), source_sha256)
        if pack_path(spec) not in found and pack_path(spec).exists():
            _check_whole(file, spec, progress)
            found.append(pack_path(spec))
    return found


def memory_needed(file: ModelFile, quant: Quant, kv_bytes: int) -> int:
    """Bytes that weights, KV memory and process take together. Raises UnsupportedArchitecture."""
    return plan_weights(file, quant).n_bytes + kv_bytes + _PROCESS_BYTES


def choose(want: WeightsMode, n_needed: int, n_available: int) -> tuple[Chosen, str]:
    """The mode, and why. ``n_needed``: bytes that weights, KV memory and process take together."""
    if want != "auto":
        return want, "as asked"
    reason = f"{decimal(n_needed)} needed, {decimal(n_available)} available"
    if n_needed <= _COMFORTABLE * n_available:
        return "memory", reason
    return ("mmap" if n_needed <= n_available else "stream"), reason


class _NoPack(Exception):
    """There is no packed file, and none can be made; the sentence says why."""


def _packed_here(
    file: ModelFile, plan: WeightPlan, context_length: int, how: str, progress: Progress = no_progress
) -> LoadedWeights:
    region = huge_empty(plan.n_bytes)
    pack_pieces(file, plan, RegionSink(region), progress)
    return LoadedWeights(PackedModel.at(plan, region, context_length), file.weights_sha256(), "memory", how)


def _from_file(file: ModelFile, plan: WeightPlan, mode: Chosen, progress: Progress) -> tuple[_U8, PackSpec]:
    """The region out of the packed file, which is made where it is missing or damaged. Raises _NoPack."""
    known = file.known_weights_sha256()
    if known is not None:
        spec = PackSpec(plan, known)
        with suppress(FileNotFoundError, PackUnusable):  # looked at again, and said, when no other process packs
            return _region(spec, mode), spec
    with _lock(plan):
        spec = PackSpec(plan, known or file.weights_sha256())
        try:
            return _region(spec, mode), spec
        except FileNotFoundError:
            pass
        except PackUnusable as error:
            log.warning("%s; it is made anew", error)
        _write(file, spec, progress)
        return _region(spec, mode), spec


def _region(spec: PackSpec, mode: Chosen) -> _U8:
    """Raises FileNotFoundError, PackUnusable."""
    pack = PackFile(pack_path(spec), spec)
    try:
        if mode == "memory":
            region = huge_empty(spec.plan.n_bytes)
            pack.read_into(region)
            return region
        region = pack.map()
        n = len(spec.pieces)
        pack.check(range(0, n, -(-n // _SAMPLED_PIECES)), region)
        return region
    finally:
        pack.close()


def _check_whole(file: ModelFile, spec: PackSpec, progress: Progress) -> None:
    pack = PackFile(pack_path(spec), spec)
    try:
        _check_against_source(file, pack)
        pack.verify(progress)
    finally:
        pack.close()


def _check_against_source(file: ModelFile, pack: PackFile) -> None:
    """Pack the smallest piece of each kind anew: a file of a program that packs otherwise is found out."""
    smallest: dict[tuple[object, ...], int] = {}
    for index, piece in enumerate(pack.spec.pieces):
        tensor = file.tensors[piece.tensor]
        key = (piece.part.kind, tensor.kind, piece.part.as_stored, type(tensor))
        if key not in smallest or piece.n_bytes < pack.spec.pieces[smallest[key]].n_bytes:
            smallest[key] = index
    for index in smallest.values():
        piece = pack.spec.pieces[index]
        packed = np.empty(piece.n_bytes, np.uint8)
        pack_piece(file.tensors[piece.tensor], piece, packed)
        pack.check_piece(index, packed)


def _write(file: ModelFile, spec: PackSpec, progress: Progress) -> None:
    """Raises _NoPack where the disk does not let us."""
    folder = packs_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reap_leftovers(folder, locked_by_writers=True)  # as large as the model: the next one may need the room
        n_free = shutil.disk_usage(folder).free
        if n_free < spec.n_file_bytes:
            raise _NoPack(
                f"{folder} has {decimal(n_free)} left and the packed file takes {decimal(spec.n_file_bytes)}; make "
                "room, or set KVFERRY_CACHE to a folder on another disk"
            )
        log.info("packing %s of weights into %s", decimal(spec.plan.n_bytes), pack_path(spec))
        began_at = time.monotonic()
        write_pack(pack_path(spec), file, spec, progress)
        _remove_superseded(folder, spec)
    except OSError as error:
        raise _NoPack(f"{error.filename or folder} cannot be written ({error.strerror})") from error
    log.info("packed in %.1f s", time.monotonic() - began_at)


def _remove_superseded(folder: Path, spec: PackSpec) -> None:
    """Files of the same weights, packed as an earlier version did it: nobody opens them any more."""
    same = {"source_sha256": spec.source_sha256, "recipe": spec.plan.recipe, "group_rows": GROUP_ROWS}
    for other in folder.glob(f"*{SUFFIX}"):
        head = read_head(other) if other.name != spec.file_name else None
        if head is not None and all(head.get(name) == value for name, value in same.items()):
            log.info("removing %s: %s takes its place", other, spec.file_name)
            other.unlink(missing_ok=True)


@contextmanager
def _lock(plan: WeightPlan) -> Iterator[None]:
    """One process packs a model, the others wait for it; where no lock can be had, each for itself."""
    name = hashlib.sha256(repr(plan.parts).encode()).hexdigest()[:16]
    with ExitStack() as stack:
        with suppress(OSError):
            packs_folder().mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((packs_folder() / f".lock-{name}").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)  # released by the kernel if this process dies
        yield
