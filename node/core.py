"""What the engine thread does with turns: finds their rows, runs them, and lets go of them.

`NodeCore` owns the scheduler, the resident sessions and all sequences; only the engine thread calls it. It never waits:
what takes long is asked of the I/O threads and comes back as a message. Time is read from the clock it is given.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping

from kvferry.engine.kv_cache import KvPool, KvSequence
from kvferry.engine.scheduler import Job, Scheduler, StepOutput
from kvferry.engine.vision.sight import SeenPrompt
from kvferry.engine.vision.tower import Features
from kvferry.node.audit import RestoreAudit
from kvferry.node.errors import StaleEpoch, StoreDown
from kvferry.node.load import NodeView, Totals
from kvferry.node.memory import RowMemory
from kvferry.node.messages import LookDone, LookRequest, Published, Reply, RestoreDone, RestoreRequest, RestoreSession
from kvferry.node.ports import CoreLimits, IoPort, VisionPort
from kvferry.node.runs import Restoring, Run, resident_of
from kvferry.node.sessions import Resident, n_shared
from kvferry.node.turns import Event, Failed, Finished, Prefix, Token, Turn

log = logging.getLogger(__name__)


class NodeCore:
    """See the module's description."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        pool: KvPool,
        new_sequence: Callable[[], KvSequence],
        io: IoPort | None,
        limits: CoreLimits,
        clock: Callable[[], float],
        post: Callable[[Turn, Event], None],
        vision: VisionPort | None = None,
        audit: RestoreAudit | None = None,
    ) -> None:
        self.totals = Totals()
        self._scheduler = scheduler
        self._pool = pool
        self._io = io
        self._limits = limits
        self._clock = clock
        self._post = post
        self._vision = vision
        self._audit = audit
        self._runs: dict[int, Run] = {}  # by run id
        self._restoring: list[Restoring] = []
        self._n_requests = 0
        self._progress_at = clock()
        self._can_step = True
        self.memory = RowMemory(
            pool=pool,
            new_sequence=new_sequence,
            io=io,
            limits=limits,
            running=self._runs.values,
            totals=self.totals,
        )
        scheduler.make_room = self.memory.make_room
        scheduler.find_rows = self._find_rows

    def audit(self) -> None:
        """In idle time: compute some restored rows again, and let go of those that are wrong."""
        if self._audit is None:
            return
        wrong = self._audit.look(self.memory.sessions)
        self.totals.blocks_audited, self.totals.blocks_wrong = self._audit.n_audited, self._audit.n_wrong
        if wrong is not None:
            self.memory.drop(wrong)

    @property
    def is_auditing(self) -> bool:
        """Whether ``audit`` has begun what it should go on with, as long as nothing else is to be done."""
        return self._audit is not None and self._audit.is_looking

    @property
    def has_work(self) -> bool:
        """Whether a step may get somewhere."""
        return self._scheduler.n_running + self._scheduler.n_queued > 0

    @property
    def waits_for_rows(self) -> bool:
        """Whether somebody waits for the store, within a deadline."""
        return bool(self._restoring) or any(run.restore is not None for run in self._runs.values())

    def view(self) -> NodeView:
        """The state at this moment, for the event loop."""
        running = {run.session_id: run.sequence.n_rows for run in self._runs.values()}
        idle = {resident.session_id: len(resident.token_ids) for resident in self.memory.sessions}
        n_used = self._pool.n_blocks - self._pool.n_free_blocks
        return NodeView(
            n_running=self._scheduler.n_running,
            n_queued=len(self._runs) - self._scheduler.n_running,
            kv_bytes_used=n_used * self._pool.block_bytes,
            kv_bytes_budget=self._pool.n_blocks * self._pool.block_bytes,
            resident=tuple((idle | running).items()),
            n_saved=self.memory.n_saved(),
            is_busy=self.has_work,
            progress_at=self._progress_at,
            stall_limit_seconds=self._stall_limit_seconds(),
        )

    def _stall_limit_seconds(self) -> float:
        """Of the next step; none while all wait for memory, which is the store's to give back."""
        if not self._can_step:
            return 0.0
        return self.totals.step_limit.seconds(with_prompts=any(not run.new_tokens for run in self._runs.values()))

    def step(self) -> bool:
        """One forward pass; False when nothing could run."""
        began_at = self._clock()
        outputs = self._scheduler.step()
        now = self._clock()
        self._can_step = bool(outputs)
        if not outputs:
            return False
        self._progress_at = now
        self.totals.measure(outputs, now - began_at, self._scheduler.counters)
        ended = [run for run in (self._tell(output, began_at, now) for output in outputs) if run is not None]
        for run in ended:  # after all tokens of the step are on their way
            self._retire(run)
        self._publish_long_answers()
        return True

    # Turns.

    def begin(self, turn: Turn) -> None:
        """Find the turn's rows and run it."""
        if self._audit is not None:
            self._audit.abandon()
        for run in self._runs_of(turn.session_id):
            self.stop(run.turn.run_id, StaleEpoch(f"session {turn.session_id} went on at epoch {turn.epoch}"))
        logits = self.memory.ends.find(turn.token_ids, turn.images, turn.namespace)
        n_most = len(turn.token_ids) - (logits is None)  # what is not known is computed, for its logits
        sequence, n_published = self.memory.rows_for(
            turn.session_id, turn.token_ids, n_most, turn.namespace, turn.images
        )
        run = Run(turn=turn, sequence=sequence, n_published=n_published, n_resident=sequence.n_rows, logits=logits)
        self._runs[turn.run_id] = run
        if not turn.recompute:
            run.restore = self._ask_restore(turn, sequence.n_rows, n_most, wants_logits=logits is None)
        run.restore_asked_at = self._clock()
        if run.restore is None:
            self._look(run)

    def stop(self, run_id: int, error: Exception | None) -> bool:
        """End a run between two steps, as cancelled or with an error; its rows stay. False when it is not here."""
        run = self._runs.get(run_id)
        if run is None:
            return False
        if run.restore is not None:
            run.restore.abandoned, run.restore = True, None
        elif run.look is not None:
            run.look.abandoned, run.look = True, None
        else:
            self._scheduler.stop(str(run_id))
        self._post(run.turn, Finished("cancelled") if error is None else Failed(error))
        self._retire(run)
        return True

    def stop_all(self, error: Exception) -> int:
        """End all runs; returns how many."""
        return sum(self.stop(run_id, error) for run_id in list(self._runs))

    def abandon_late_restores(self) -> None:
        """Compute the rows of those who waited too long for the store."""
        now = self._clock()
        stalled = self._io is not None and self._io.reads_stalled()
        for run in list(self._runs.values()):
            if run.restore is not None and (
                stalled or now > run.restore_asked_at + self._limits.restore_deadline_seconds
            ):
                log.warning(
                    "session %s: the store is too slow, rows are recomputed", run.session_id,
                    extra={"session_id": run.session_id},
                )  # fmt: skip
                run.restore.abandoned, run.restore = True, None
                run.restore_seconds = now - run.restore_asked_at
                self._look(run)
        for waiting in list(self._restoring):
            if stalled or now > waiting.asked_at + self._limits.restore_deadline_seconds:
                waiting.request.abandoned = True
                self._restoring.remove(waiting)
                waiting.wanted.reply.fail(StoreDown("the store did not give the session's rows in time"))

    def _runs_of(self, session_id: str) -> list[Run]:
        return [run for run in self._runs.values() if run.session_id == session_id]

    def _look(self, run: Run) -> None:
        """The run has what rows there are: have the vision tower see the images of the others, and run it."""
        turn = run.turn
        unseen = tuple(image for image in turn.images if image.end > run.sequence.n_rows)
        if self._vision is None or not unseen:
            self._submit(run, {})
        else:
            run.look = LookRequest(unseen, turn.pixels, turn.namespace)
            self._vision.submit(run.look)

    def look_done(self, done: LookDone) -> None:
        """Images were seen, or cannot be; nobody may be waiting any more."""
        run = next((run for run in self._runs.values() if run.look is done.request), None)
        if run is None:
            return
        run.look, run.look_seconds, run.n_looked = None, done.seconds, done.n_tokens
        if done.error is None:
            self._submit(run, done.features)
        else:
            self._post(run.turn, Failed(done.error))
            self._retire(run)

    def _submit(self, run: Run, features: Mapping[bytes, Features]) -> None:
        if not self.has_work:
            self._progress_at = self._clock()  # it stalls from now on, not since it last had work
        turn = run.turn
        if turn.images and self._vision is not None:
            run.seen = SeenPrompt(turn.images, features, self._vision.merge_size)
        job = Job(
            job_id=str(turn.run_id),
            sequence=run.sequence,
            token_ids=turn.token_ids,
            n_prompt_tokens=turn.n_prompt_tokens,
            sampling=turn.sampling,
            max_tokens=turn.max_tokens,
            end_token_ids=turn.end_token_ids,
            priority=turn.priority,
            arrival=turn.run_id,  # a turn that waited for the store keeps its place
            seen=run.seen,
            rule=turn.rule,
            logits=run.logits,
            namespace=turn.namespace,
        )
        self._scheduler.submit(job)

    def _find_rows(self, job: Job) -> tuple[KvSequence, int] | None:
        """What became resident while the job waited for its place: another session's turn that ended meanwhile."""
        run = self._runs[int(job.job_id)]
        return self.memory.whole_blocks_for(run.session_id, run.turn.token_ids[:-1], run.namespace, run.images)

    def _tell(self, output: StepOutput, began_at: float, now: float) -> Run | None:
        """Post what a step did for one run; returns the run when it ended."""
        run = self._runs[int(output.job_id)]
        if run.started_at is None:
            run.started_at = began_at
        run.n_shared = output.n_shared
        if not run.new_tokens and (output.token is not None or output.finish is not None):
            self._post(run.turn, run.prefix(now, is_computed=output.token is not None))
        if output.logits is not None:  # the same prompt, asked again, needs no forward pass before its first token
            self.totals.prompts_covered += run.logits is output.logits
            self.memory.ends.remember(run.turn.token_ids, run.images, output.logits, run.namespace)
        if output.token is not None:
            if run.seen is not None and not run.new_tokens:
                run.seen.forget_features()
            run.new_tokens.append(output.token.token_id)
            self._post(run.turn, Token(output.token_index, output.token))
        if output.error is not None:
            self._post(run.turn, Failed(output.error))
        elif output.finish is not None:
            self._post(run.turn, Finished(output.finish))
        return run if output.finish is not None or output.error is not None else None

    # Restores.

    def _ask_restore(
        self, wanted: Turn | RestoreSession, n_rows: int, n_most: int, *, wants_logits: bool = False
    ) -> RestoreRequest | None:
        """Ask for a prefix that is worth more than the n_rows we have; None when that cannot be."""
        n_least = n_rows + self._limits.restore_min_tokens
        if self._io is None or n_least > n_most or not self._io.readable():
            return None
        n_short = -(-n_most // self._pool.geometry.block_size) - self._pool.n_free_blocks
        if n_short > 0 and self.memory.make_room(n_short) != "free":
            return None
        self._n_requests += 1
        request = RestoreRequest(
            self._n_requests, wanted.session_id, wanted.token_ids, n_least, n_most, wanted.images, wants_logits,
            wanted.namespace,
        )  # fmt: skip
        self._io.submit(request)
        return request

    def restore_session(self, wanted: RestoreSession) -> None:
        """Bring a prefix into memory; computes nothing."""
        token_ids, n_tokens = wanted.token_ids, len(wanted.token_ids)
        for run in self._runs_of(wanted.session_id):
            n_common = n_shared(run, token_ids, wanted.namespace, wanted.images)
            wanted.reply.ok(Prefix.in_memory(n_tokens, n_common))
            return
        sequence, n_published = self.memory.rows_for(
            wanted.session_id, token_ids, n_tokens, wanted.namespace, wanted.images
        )
        n_rows = sequence.n_rows
        self.memory.keep(resident_of(wanted, sequence, n_published))
        request = self._ask_restore(wanted, n_rows, n_tokens)
        if request is None:
            wanted.reply.ok(Prefix.in_memory(n_tokens, n_rows))
        else:
            self._restoring.append(Restoring(wanted, request, self._clock(), n_rows))

    def restore_done(self, done: RestoreDone) -> None:
        """Rows came, or did not; nobody may be waiting any more."""
        self.totals.snapshots_refused += len(done.refused)
        self.totals.restore_rate.add(done.n_bytes, done.seconds)
        waiting = next((w for w in self._restoring if w.request is done.request), None)
        run = next((run for run in self._runs.values() if run.restore is done.request), None)
        if waiting is not None:
            self._restoring.remove(waiting)
            self._keep_restored(waiting, done)
        elif run is not None:
            self._resume(run, done)
        elif done.sequence is not None:
            done.sequence.release()

    def _resume(self, run: Run, done: RestoreDone) -> None:
        run.restore = None
        run.restore_seconds = self._clock() - run.restore_asked_at
        run.refused = done.refused
        if done.sequence is not None:
            run.sequence.release()
            run.sequence, run.snapshot = done.sequence, done.snapshot
            run.n_resident, run.n_restored, run.n_published = 0, done.sequence.n_rows, done.sequence.n_rows
            run.logits = run.logits if done.logits is None else done.logits
            self._note_restored(run.session_id, done)
        self._look(run)

    def _keep_restored(self, waiting: Restoring, done: RestoreDone) -> None:
        wanted = waiting.wanted
        prefix = Prefix.in_memory(len(wanted.token_ids), waiting.n_resident)
        if done.sequence is not None:
            n_rows = done.sequence.n_rows
            self.memory.keep(resident_of(wanted, done.sequence, n_rows))
            self._note_restored(wanted.session_id, done)
            prefix = dataclasses.replace(prefix, n_resident=0, n_restored=n_rows, snapshot=done.snapshot)
        seconds = self._clock() - waiting.asked_at
        wanted.reply.ok(dataclasses.replace(prefix, restore_seconds=seconds, refused_snapshots=done.refused))

    def _note_restored(self, session_id: str, done: RestoreDone) -> None:
        if self._audit is not None and done.sequence is not None:
            self._audit.note(session_id, done.sequence.n_rows, done.snapshot)

    # Sessions.

    def _retire(self, run: Run) -> None:
        """The run is over: its session stays in memory, and its rows go to the store."""
        del self._runs[run.turn.run_id]
        token_ids = run.tokens_with_rows()
        if not len(token_ids):
            run.sequence.release()
            return
        n_published = min(run.n_published, len(token_ids))
        resident = Resident(
            run.session_id, token_ids, run.sequence, n_published, images=run.images, namespace=run.namespace
        )
        self.memory.keep(resident)
        if self.memory.publisher.is_worth(resident):
            self.memory.publisher.publish_fork(resident)
        else:
            self.totals.saves_not_worth_it += self.memory.publisher.can_save(resident) and resident.n_unpublished > 0

    def _publish_long_answers(self) -> None:
        for run in self._runs.values():
            n_known = max(run.n_published, run.n_publish_asked)
            if (
                self.memory.publisher.can_save(run)
                and run.new_tokens
                and run.sequence.n_rows - n_known >= self._limits.publish_every_tokens
            ):
                run.n_publish_asked = run.sequence.n_rows
                self.memory.publisher.publish_fork(run)

    def save(self, session_id: str, reply: Reply[Published]) -> bool:
        """Publish a session's rows now; False when it is not here or has no rows."""
        owner = next(self.memory.owners(session_id), None)
        if owner is None or not owner.sequence.n_rows:
            return False
        self.memory.publisher.publish_fork(owner, reply)
        return True

    def drop(self, session_id: str, error: Exception) -> None:
        """Forget a session; stop its run."""
        for run in self._runs_of(session_id):
            self.stop(run.turn.run_id, error)
        self.memory.drop(session_id)
