"""The engine on a thread of its own: commands go in through a queue, tokens come out on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from peagle.engine.engine import Engine
from peagle.engine.outputs import StepOutput
from peagle.engine.request import Status
from peagle.engine.sampling_params import SamplingParams
from peagle.errors import InputError
from peagle.server.calls import Call, Job, Update
from peagle.server.errors import ApiError, bad_request, engine_failed, queue_full, shutting_down
from peagle.server.metrics import ServerMetrics
from peagle.server.seats import Seat, Seats

log = logging.getLogger(__name__)

# So many failed steps without a good one between them mean that the engine will not recover (a lost GPU, say).
FAILURES_UNTIL_UNHEALTHY = 3
STOP_SECONDS = 15


@dataclass(slots=True)
class _Add:
    jobs: list[Job]
    added: asyncio.Future[None]


@dataclass(slots=True)
class _Abort:
    request_ids: list[str]


class _Stop:
    pass


@dataclass(slots=True)
class _Fail:
    error: ApiError


class EngineLoop:
    """Owns the engine's thread. Methods without a leading underscore belong to the event loop, `_run` and what it calls
    to the thread; only the command queue and `call_soon_threadsafe` lie between them.

    max_queue: how many requests may wait beyond the `max_num_seqs` that can run at once.
    """

    def __init__(self, engine: Engine, model_name: str, max_queue: int) -> None:
        self.engine = engine
        self.capacity = engine.config.max_num_seqs + max_queue
        self.metrics = ServerMetrics(engine, model_name, lambda: max(len(self._open) - len(engine.requests), 0))
        self.draining = False
        self.failures = 0  # failed steps in a row
        self.entering, self.tokenizing = Seats(), Seats()  # event loop's: on their way here; /tokenize and /detokenize
        self._open: dict[str, Job] = {}  # event loop's: submitted, neither finished nor aborted
        self._adding: set[asyncio.Future[None]] = set()  # event loop's: not in the engine yet
        self._lost: ApiError | None = None  # event loop's: why the thread has ended
        self._jobs: dict[str, Job] = {}  # thread's: in the engine
        self._unscheduled: list[Job] = []  # thread's: in the engine, not run yet
        self._commands: queue.SimpleQueue[_Add | _Abort | _Fail | _Stop] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._event_loop: asyncio.AbstractEventLoop | None = None

    # on the event loop

    def start(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after the step that it is in; one that hangs is left behind."""
        self._commands.put(_Stop())
        await asyncio.to_thread(self._thread.join, STOP_SECONDS)

    @property
    def num_open(self) -> int:
        """Requests that run or wait in the engine."""
        return len(self._open)

    @property
    def num_taken(self) -> int:
        """Requests that have been taken in and not been answered: the open ones and all that hold seats."""
        return len(self._open) + self.entering.num_held + self.tokenizing.num_held

    @property
    def healthy(self) -> bool:
        return self._thread.is_alive() and self.failures < FAILURES_UNTIL_UNHEALTHY

    def admit(self, count: int) -> Seat:
        """Take in so many requests, which are then to be submitted. Raises ApiError (400, 429, 503) without room."""
        if self.draining:
            raise shutting_down()
        if self._lost is not None:
            raise self._lost
        if count > self.capacity:
            raise bad_request("n", f"n times prompts: got {count}, and the server takes {self.capacity} at once")
        taken = len(self._open) + self.entering.num_held
        if taken + count > self.capacity:
            self.metrics.rejected.inc()
            raise queue_full(taken, self.capacity)
        return self.entering.take(count)

    def admit_tokenizing(self) -> Seat:
        """Take in a request that only asks for tokens or text: as many as of the others, beside them. Raises ApiError
        (429, 503)."""
        if self.draining:
            raise shutting_down()
        if self.tokenizing.num_held >= self.capacity:
            raise queue_full(self.tokenizing.num_held, self.capacity)
        return self.tokenizing.take(1)

    async def submit(
        self, seat: Seat, prompts: Sequence[tuple[list[int], SamplingParams]], n: int = 1, stream_interval: int = 1
    ) -> Call:
        """Enter all choices of a call, for as many as the seat has places, or none; n of them in a row are answers to
        one prompt. stream_interval: as `Call` has it.

        Raises ApiError when the engine has been lost or the time to drain is over, InputError from the engine's checks.
        """
        assert len(prompts) == seat.count
        if self._lost is not None:
            raise self._lost
        if seat.failed.done():
            raise seat.failed.result()
        call = Call(self, prompts, n, stream_interval)
        seat.release()
        self._open |= {job.request_id: job for job in call.jobs}
        added: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._adding.add(added)
        self._commands.put(_Add(call.jobs, added))
        try:
            await added
        except BaseException:  # a disconnect too
            call.close()
            raise
        finally:
            self._adding.discard(added)
        return call

    def abort(self, jobs: Sequence[Job]) -> None:
        """Drop those of the jobs that have not finished."""
        ids = [job.request_id for job in jobs if self._open.pop(job.request_id, None) is not None]
        if ids:
            self._commands.put(_Abort(ids))

    def fail_all(self, error: ApiError) -> None:
        """End everything that runs or waits, or is on its way, with an error."""
        self.entering.fail_all(error)
        self.tokenizing.fail_all(error)
        self._commands.put(_Fail(error))

    def _hand_out(self, updates: list[tuple[Job, Update | ApiError]]) -> None:
        for job, update in updates:
            if isinstance(update, ApiError) or update.finished:
                self._open.pop(job.request_id, None)
            job.call.updates.put_nowait(update)

    def _lose(self, error: ApiError) -> None:
        """The thread has ended of itself: nobody must wait for it."""
        self._lost = error
        for added in self._adding:
            _resolve(added, error)
        self._hand_out([(job, error) for job in list(self._open.values())])

    # on the thread

    def _run(self) -> None:
        try:
            if self.engine.target.device.type == "cuda":
                torch.cuda.set_device(self.engine.target.device)  # a thread begins with the first one
            self._run_steps()
        except BaseException as error:
            log.exception("the engine's thread has ended")
            self._tell(self._lose, engine_failed(error))

    def _run_steps(self) -> None:
        while self._obey(wait=not self.engine.has_unfinished):
            if not self.engine.has_unfinished:
                continue
            began = time.monotonic()
            try:
                outputs = self.engine.step()
                self._report(outputs, began)
                self.failures = 0
            except Exception as error:
                log.exception("a step failed; the requests in flight are dropped")
                self.failures += 1
                self._drop_all(engine_failed(error))

    def _obey(self, wait: bool) -> bool:
        """Carry out all commands that are there, waiting for a first one if told to; False to stop."""
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if isinstance(command, _Add):
                self._add(command)
            elif isinstance(command, _Abort):
                self._abort(command.request_ids)
            elif isinstance(command, _Fail):
                self._drop_all(command.error)
            else:
                return False

    def _tell(self, callback: Callable[..., Any], *args: Any) -> None:
        assert self._event_loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._event_loop.call_soon_threadsafe(callback, *args)

    def _add(self, command: _Add) -> None:
        error: Exception | None = None
        for job in command.jobs:
            try:
                job.request = self.engine.add_request(
                    job.request_id, job.prompt_token_ids, job.params, job.stream_interval
                )
            except Exception as raised:
                error = raised if isinstance(raised, InputError) else engine_failed(raised)
                break
            self._jobs[job.request_id] = job
            self._unscheduled.append(job)
        if error is not None:
            self._forget([job.request_id for job in command.jobs])
        self._tell(_resolve, command.added, error)

    def _forget(self, request_ids: list[str]) -> int:
        """Take requests out of the engine; how many were there."""
        found = 0
        for request_id in request_ids:
            if self._jobs.pop(request_id, None) is not None:
                self.engine.abort(request_id)
                found += 1
        self._unscheduled = [job for job in self._unscheduled if job.request_id in self._jobs]
        return found

    def _abort(self, request_ids: list[str]) -> None:
        self.metrics.finished["abort"].inc(self._forget(request_ids))

    def _drop_all(self, error: ApiError) -> None:
        jobs = list(self._jobs.values())
        # a step that failed halfway may have ended requests without giving their blocks back
        scheduler = self.engine.scheduler
        scheduler.remove_finished([r for r in scheduler.running if r.status is Status.FINISHED])
        self._forget([job.request_id for job in jobs])
        self.metrics.finished["error"].inc(len(jobs))
        self._tell(self._hand_out, [(job, error) for job in jobs])

    def _report(self, outputs: list[StepOutput], began: float) -> None:
        """Count a step's tokens and send them to those who wait for them."""
        now = time.monotonic()
        metrics = self.metrics
        metrics.count_step()
        if self._unscheduled:
            still = []
            for job in self._unscheduled:
                assert job.request is not None
                if job.request.status is Status.WAITING:
                    still.append(job)
                else:
                    metrics.requests.scheduled(job.times, began)
            self._unscheduled = still
        updates: list[tuple[Job, Update | ApiError]] = []
        failed: list[Job] = []
        ended: list[Job] = []  # stay with `_drop_all` until all is done that can fail
        prompt_tokens = tokens = 0
        for output in outputs:
            job = self._jobs[output.request_id]
            assert job.request is not None
            if output.error is not None:
                log.error("a request could not be run", exc_info=output.error)
                updates.append((job, engine_failed(output.error)))
                failed.append(job)
                continue
            tokens += len(output.new_token_ids)
            update = job.held = job.held or Update(job.index, "", [])
            update.token_ids += output.new_token_ids
            if output.new_logprobs is not None:
                if update.logprobs is None:
                    update.logprobs = []
                update.logprobs += output.new_logprobs
            if job.times.first_token is None:
                update.prompt_logprobs = job.request.prompt_logprobs
                prompt_tokens += job.request.num_prompt
                metrics.prompt(job.request.num_prompt, max(job.request.num_cached_tokens, 0))
            metrics.requests.tokens(job.times, now)
            if output.finished:
                update.finish_reason, update.stop_reason = output.finish_reason, output.stop_reason
                update.metrics = job.request.metrics
                update.text = output.new_text if output.new_text is not None else self.engine.text(job.request)
                ended.append(job)
            elif output.new_text is None:
                continue
            else:
                update.text = output.new_text
            updates.append((job, update))
            job.held = None
        for job in ended:
            assert job.request is not None
            del self._jobs[job.request_id]
            metrics.finished[job.request.finish_reason or "stop"].inc()
            metrics.requests.ended(job.times, job.group, job.request)
        for job in failed:
            del self._jobs[job.request_id]
            metrics.finished["error"].inc()
        metrics.generation_tokens.inc(tokens)
        if outputs:
            metrics.step_tokens.observe(prompt_tokens + tokens)
        if updates:
            self._tell(self._hand_out, updates)


def _resolve(added: asyncio.Future[None], error: Exception | None) -> None:
    if added.done():  # whoever waited has gone
        return
    if error is None:
        added.set_result(None)
    else:
        added.set_exception(error)
