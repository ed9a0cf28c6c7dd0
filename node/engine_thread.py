"""The one thread that owns the engine. Commands come in through a bounded queue; events go out to the event loop in
batches."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Final, assert_never

from kvferry.node.core import NodeCore
from kvferry.node.errors import EngineFailed, QueueFull, SlowClient, UnknownSession
from kvferry.node.load import NodeView
from kvferry.node.messages import (
    BeginTurn,
    Command,
    Drain,
    DrainCount,
    DropSession,
    LookDone,
    PublishDone,
    Reply,
    RestoreDone,
    RestoreSession,
    SaveSession,
    Shutdown,
    StopRun,
)
from kvferry.node.turns import Event, Turn

log = logging.getLogger(__name__)

MAX_COMMANDS: Final = 8192
"""A turn brings two, an answer of an I/O thread one; turns, calls and requests to those threads are bounded before."""

STUCK_WAIT_SECONDS: Final = 0.02
"""All jobs wait for memory that a publish holds: look again so often, or as soon as a command comes."""

RESTORE_WAIT_SECONDS: Final = 0.05
"""How late a restore's deadline may be noticed."""

IDLE_WAIT_SECONDS: Final = 1.0


class EngineThread:
    """Runs a `NodeCore`. `send` and `view` may be used by any thread; the rest by the event loop.

    `on_fatal` is called on the event loop when the thread ends by a bug: all turns have been told, the process should
    end.
    """

    def __init__(
        self,
        make_core: Callable[[Callable[[Turn, Event], None]], NodeCore],
        loop: asyncio.AbstractEventLoop,
        on_fatal: Callable[[], None],
        prepare_thread: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = loop
        self._prepare_thread = prepare_thread
        self._on_fatal = on_fatal
        self._commands: queue.Queue[Command] = queue.Queue(maxsize=MAX_COMMANDS)
        self._events: list[tuple[Turn, Event]] = []
        self._drains: list[tuple[Reply[DrainCount], int]] = []
        self._core = make_core(lambda turn, event: self._events.append((turn, event)))
        self._ending = False
        self._progressed = True
        self.beat_at = time.monotonic()  # when the thread last came around, which it does without work as well
        self.view: NodeView = self._core.view()
        self._thread = threading.Thread(target=self._run, name="kvferry-engine", daemon=True)

    @property
    def core(self) -> NodeCore:
        """For its counters, which any thread may read."""
        return self._core

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def send(self, command: Command) -> None:
        """Queue a command; raises QueueFull."""
        try:
            self._commands.put_nowait(command)
        except queue.Full as error:
            raise QueueFull("this node has more to do than it can remember; try again, or another one") from error

    def close(self, timeout: float) -> bool:
        """Wait for the thread to end after Shutdown; False when it did not within `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # The engine thread: its whole life.

    def _run(self) -> None:
        try:
            self._prepare_thread()
            while not self._ending:
                self.beat_at = time.monotonic()
                commands = self._take_commands()
                for command in commands:
                    self._handle(command)
                if not (commands or self._core.has_work or self._core.waits_for_rows):
                    self._core.audit()
                self._core.abandon_late_restores()
                self._flush()  # what was begun is seen, should the step hang
                self._progressed = self._core.step() if self._core.has_work else True
                self._answer_drains()
                self._flush()
        except BaseException:
            log.exception("the engine thread ends by a bug; this process has to be started again")
            self._fail_all()

    def _take_commands(self) -> list[Command]:
        """All waiting commands; waits for one when there is nothing else to do."""
        commands: list[Command] = []
        wait = self._wait_seconds()
        with contextlib.suppress(queue.Empty):
            if wait:
                commands.append(self._commands.get(timeout=wait))
            while len(commands) < MAX_COMMANDS:
                commands.append(self._commands.get_nowait())
        return commands

    def _wait_seconds(self) -> float:
        if self._core.has_work:
            return 0.0 if self._progressed else STUCK_WAIT_SECONDS
        if self._core.waits_for_rows:
            return RESTORE_WAIT_SECONDS
        return 0.0 if self._core.is_auditing else IDLE_WAIT_SECONDS

    def _handle(self, command: Command) -> None:
        match command:
            case BeginTurn():
                self._core.begin(command.turn)
            case StopRun():
                self._core.stop(command.run_id, command.error)
            case RestoreDone() | PublishDone() | LookDone():
                self._take_in(command)
            case RestoreSession():
                self._core.restore_session(command)
            case SaveSession():
                if not self._core.save(command.session_id, command.reply):
                    command.reply.fail(UnknownSession(f"session {command.session_id} is not in this node's memory"))
            case DropSession():
                self._core.drop(command.session_id, UnknownSession(f"session {command.session_id} was dropped"))
                self.view = self._core.view()  # who is answered may ask for the state at once
                command.reply.ok(None)
            case Drain():
                self._drains.append((command.reply, self._core.stop_all(command.error)))
                self._core.memory.save_all()
            case Shutdown():
                self._core.stop_all(command.error)
                self._ending = True
            case _:
                assert_never(command)

    def _take_in(self, done: RestoreDone | PublishDone | LookDone) -> None:
        """What another thread was asked for."""
        match done:
            case RestoreDone():
                self._core.restore_done(done)
            case PublishDone():
                self._core.memory.publisher.done(done)
            case LookDone():
                self._core.look_done(done)

    def _answer_drains(self) -> None:
        if self._drains and not self._core.memory.publisher.n_asked:
            for reply, n_moved in self._drains:
                reply.ok(DrainCount(self._core.memory.n_saved(), n_moved))
            self._drains.clear()

    def _flush(self) -> None:
        """One wake-up of the event loop for all events of a step."""
        self.view = self._core.view()
        if self._events:
            events, self._events = self._events, []
            self._on_loop(lambda: self._deliver(events))

    def _fail_all(self) -> None:
        with contextlib.suppress(Exception):
            self._core.stop_all(EngineFailed("the engine of this node failed; send the turn to another one"))
        self._flush()
        self._on_loop(self._on_fatal)

    def _on_loop(self, act: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            self._loop.call_soon_threadsafe(act)

    # The event loop.

    def _deliver(self, events: list[tuple[Turn, Event]]) -> None:
        for turn, event in events:
            try:
                turn.outbox.put(event)
            except SlowClient as error:
                self.send(StopRun(turn.run_id, error))
