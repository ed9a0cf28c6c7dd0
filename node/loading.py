"""From settings to a node that can serve: model, engine, store, threads. Runs in a thread of its own; takes seconds."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.batch import pass_rows, tile_rows
from kvferry.engine.config import VisionConfig
from kvferry.engine.cores import choose_cores, pinned_to
from kvferry.engine.engine import Chunk, Engine, EngineOptions
from kvferry.engine.errors import UnsupportedArchitecture
from kvferry.engine.files.resolve import resolve_model
from kvferry.engine.kernels.compile_cache import n_damaged
from kvferry.engine.kv_cache import KvKind, KvSequence
from kvferry.engine.pacing import StepPacer
from kvferry.engine.sampling import warm_up
from kvferry.engine.scheduler import Scheduler
from kvferry.engine.selftest import self_test
from kvferry.engine.speculation import Speculator
from kvferry.engine.text.model import TextModel
from kvferry.engine.vision.positions import Grid
from kvferry.node.audit import RestoreAudit
from kvferry.node.config import NodeConfig
from kvferry.node.core import NodeCore
from kvferry.node.engine_thread import EngineThread
from kvferry.node.errors import StoreMisconfigured
from kvferry.node.io_threads import IoThreads
from kvferry.node.messages import LookDone, StoreDone
from kvferry.node.ports import CoreLimits
from kvferry.node.rules import Rules
from kvferry.node.speculating import make_speculator
from kvferry.node.state import Identity, Serving
from kvferry.node.store_path import check_store
from kvferry.node.vision_thread import VisionThread
from kvferry.proto.v1 import common_pb2
from kvferry.store import vlkv3
from kvferry.store.errors import StoreError
from kvferry.store.geometry import KvGeometry
from kvferry.store.payload import Kind, row_bytes
from kvferry.store.pins import Pins
from kvferry.store.snapshot_store import SnapshotStore
from kvferry.store.write_budget import WriteBudget
from kvferry.telemetry import events

log = logging.getLogger(__name__)

PACKING_LOG_SECONDS = 5.0

WARM_UP_ROWS = (1, 33)
"""A decode, and a prefill over a block's edge: all kernels have run before anybody waits for them."""


def load_serving(
    config: NodeConfig,
    loop: asyncio.AbstractEventLoop,
    boot_id: str,
    version: str,
    on_fatal: Callable[[], None],
    on_store_done: Callable[[StoreDone], None] = lambda _: None,
    begins: Callable[[str], None] = lambda _: None,
) -> Serving:
    """Everything but starting the engine thread. Raises EngineError (SelfTestFailed where the bits are wrong),
    StoreMisconfigured. ``on_store_done`` is told what the I/O threads have done, on these threads; ``begins`` each step
    that takes long."""
    path = resolve_model(config.model)
    if config.store_place is not None:
        check_store(config.store_place, config.store_stall_seconds)
    cores = choose_cores()
    options = EngineOptions(
        n_threads=config.n_threads,
        cores=cores.pinned,
        kv_bytes=int(config.kv_memory),
        context_length=config.context,
        quant=config.quant,
        kv=KvKind(config.kv),
        weights=config.weights,
    )
    begins("loads its weights and compiles its kernels, if those are new")
    text = TextModel.load(path)
    progress = _PackingLog(time.monotonic, begins)
    engine = Engine.load(path, options, progress=progress, tokenizer_digest=text.digest)
    log.info("weights: %s", engine.weights)
    begins("tests itself on golden bits, and runs its kernels once")
    self_test(config.n_threads)
    _warm_up(engine)
    for _ in range(n_damaged()):
        events.count("compile_cache_healed")
    speculator, draft = make_speculator(config, engine)
    threads: list[EngineThread] = []
    io = None
    vision = _vision_thread(config, engine, lambda done: threads[0].send(done))  # noqa: PLW0108 - the thread is made below

    def deliver(done: StoreDone) -> None:
        on_store_done(done)
        threads[0].send(done)

    if config.store is not None:
        io = IoThreads(
            open_store=partial(open_store, config, engine, _write_budget(config), Pins()),
            new_sequence=engine.new_sequence,
            deliver=deliver,
            stall_seconds=config.store_stall_seconds,
            pool=engine.pool,
        )
        with pinned_to(cores.others):  # its threads inherit it
            _start(io)
    threads.append(_make_engine_thread(config, engine, speculator, io, vision, loop, on_fatal))
    log.info("%d engine threads on processors %s", engine.n_threads, cores)
    seen = engine.config.vision if vision is not None else None
    return Serving(
        identity=_identity(config, engine, str(cores), text, seen, boot_id, version),
        engine=threads[0],
        io=io,
        vision=vision,
        rules=Rules(text),
        close_engine=partial(_close, [engine] if draft is None else [engine, draft]),
    )


def _close(engines: list[Engine]) -> None:
    for engine in engines:
        engine.close()


def _vision_thread(config: NodeConfig, engine: Engine, deliver: Callable[[LookDone], None]) -> VisionThread | None:
    """Started, after a look at an empty picture, so that all of its kernels have run; None where nothing can see."""
    vision = engine.config.vision
    if vision is None:
        return None
    started_at = time.monotonic()
    try:
        tower = engine.tower
    except UnsupportedArchitecture as error:
        log.warning("this node serves text only: %s", error)
        return None
    grid = Grid(1, vision.merge_size, vision.merge_size)
    tower.see(np.zeros((grid.n_patches, vision.patch_elements), np.float32), [grid])
    log.info("the vision tower warmed up in %.1f s", time.monotonic() - started_at)
    thread = VisionThread(tower, int(config.vision_cache), deliver)
    thread.start()
    return thread


class _PackingLog:
    """Says how far packing is, every few seconds."""

    def __init__(self, clock: Callable[[], float], begins: Callable[[str], None]) -> None:
        self._clock, self._said_at, self._begins = clock, clock(), begins

    def __call__(self, n_done: int, n_bytes: int) -> None:
        if self._clock() - self._said_at >= PACKING_LOG_SECONDS:
            self._said_at = self._clock()
            done = f"packing weights: {100 * n_done // n_bytes} % of {n_bytes / 1e9:.1f} GB"
            log.info(done)
            self._begins(done)


def _write_budget(config: NodeConfig) -> WriteBudget | None:
    return None if config.store_write_per_hour is None else WriteBudget(int(config.store_write_per_hour))


def open_store(
    config: NodeConfig, engine: Engine, write_budget: WriteBudget | None, pins: Pins, namespace: str
) -> SnapshotStore:
    """The store of this engine's fingerprint and a namespace; its first call may raise StoreError or hang."""
    if config.store_place is None:
        raise ValueError("there is no store to open")
    fs, root, seal = config.store_place.open()
    vision = engine.config.vision
    return SnapshotStore(
        root=root,
        fingerprint=engine.fingerprint,
        geometry=_stored_geometry(engine),
        vocab_size=engine.config.vocab_size,
        max_bytes=int(config.store_max_bytes),
        max_files=config.store_max_files,
        node_id=config.node_id,
        fs=fs,
        seal=seal,
        version=config.store_version,
        kind=Kind[engine.geometry.kind.name],
        placeholder_ids=() if vision is None else (vision.image_token_id, vision.video_token_id),
        write_budget=write_budget,
        pins=pins,
        tenant=namespace,
    )


def _stored_geometry(engine: Engine) -> KvGeometry:
    geometry = engine.geometry
    return KvGeometry(geometry.n_layers, geometry.n_kv_heads, geometry.head_dim, geometry.block_size)


def _start(io: IoThreads) -> None:
    try:
        io.start()
    except StoreError as error:  # a person has to act; what passes by itself is served without
        raise StoreMisconfigured(str(error)) from error


def _warm_up(engine: Engine) -> None:
    started_at = time.monotonic()
    for n_rows in WARM_UP_ROWS:
        sequence = engine.new_sequence()
        engine.forward([Chunk(sequence, np.zeros(n_rows, dtype=np.int32), "last")])
        sequence.release()
    warm_up(engine.config.vocab_size)
    log.info("the engine warmed up in %.1f s", time.monotonic() - started_at)


def _make_engine_thread(
    config: NodeConfig,
    engine: Engine,
    speculator: Speculator | None,
    io: IoThreads | None,
    vision: VisionThread | None,
    loop: asyncio.AbstractEventLoop,
    on_fatal: Callable[[], None],
) -> EngineThread:
    limits = CoreLimits(
        max_sessions=config.max_sessions,
        publish_every_tokens=config.publish_every_tokens,
        publish_min_tokens=config.publish_min_tokens,
        restore_min_tokens=config.restore_min_tokens,
        restore_deadline_seconds=config.restore_deadline_seconds,
        saves_images=config.store_version == vlkv3.VERSION,
    )
    pacer = StepPacer(
        target_ratio=config.decode_slowdown,
        step_seconds=config.step_seconds,
        tile_rows=tile_rows(engine.config),
        pass_rows=pass_rows(engine.config),
    )
    scheduler = Scheduler(
        engine, max_running=config.max_running, clock=time.monotonic, pacer=pacer, speculator=speculator
    )
    return EngineThread(
        lambda post: NodeCore(
            scheduler=scheduler,
            pool=engine.pool,
            new_sequence=engine.new_sequence,
            io=io,
            limits=limits,
            clock=time.monotonic,
            post=post,
            vision=vision,
            audit=_audit_of(engine),
        ),
        loop,
        on_fatal,
        engine.pin_this_thread,
    )


def _audit_of(engine: Engine) -> RestoreAudit:
    def compute(sequence: KvSequence, token_ids: NDArray[np.int32]) -> None:
        engine.forward([Chunk(sequence, token_ids, "none")])

    return RestoreAudit(compute, engine.geometry, time.monotonic, random.Random())  # noqa: S311 - not a secret


def _identity(
    config: NodeConfig,
    engine: Engine,
    cores: str,
    text: TextModel,
    vision: VisionConfig | None,
    boot_id: str,
    version: str,
) -> Identity:
    geometry = engine.geometry
    return Identity(
        boot_id=boot_id,
        version=version,
        model=text.model_name or config.model,
        model_config=engine.config,
        fingerprint=engine.fingerprint,
        tokenizer_digest=text.digest,
        kernel_path=engine.kernel_path,
        weights=engine.weights,
        n_threads=engine.n_threads,
        cores=cores,
        context_length=engine.context_length,
        vision=vision,
        geometry=common_pb2.KvGeometry(
            n_layers=geometry.n_layers,
            n_kv_heads=geometry.n_kv_heads,
            head_dim=geometry.head_dim,
            block_size=geometry.block_size,
        ),
        bytes_per_row=geometry.n_layers * row_bytes(Kind[geometry.kind.name], _stored_geometry(engine)),
    )
