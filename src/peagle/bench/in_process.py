"""The engine in this process under the same closed loop as a server gets, with the same record a request."""

from __future__ import annotations

import time
from collections.abc import Callable

from peagle.bench.conversations import EngineLike
from peagle.bench.load_client import Sampling
from peagle.bench.questions import Question, Questions
from peagle.bench.records import Record, Run
from peagle.engine.sampling_params import SamplingParams
from peagle.engine.stats import SpecMetrics
from peagle.errors import InputError


def run_in_process(
    engine: EngineLike,
    questions: Questions,
    concurrency: int,
    sampling: Sampling,
    on_record: Callable[[Record], None] | None = None,
    limit: int | None = None,
) -> Run:
    """Ask all conversations, `concurrency` at a time, in the workload's order; limit: only the first so many.

    Tokens arrive when the step that made them has ended. An error of the engine fails everything in flight, and what
    was waiting is recorded as not sent: its state is not to be trusted any more.
    """
    engine.stats.reset()
    waiting = iter(range(min(len(questions), limit or len(questions))))
    run = Run([], 0.0)
    skipped_before = questions.num_skipped
    open_: dict[str, tuple[Question, Record]] = {}
    exact = questions.workload.output_len is not None
    broken = ""
    origin = time.perf_counter()

    def end(question: Question, record: Record) -> None:
        run.records.append(record)
        if on_record is not None:
            on_record(record)
        following = questions.after(question, record)
        if following is not None:
            ask(following)

    def ask(question: Question) -> None:
        assert question.token_ids is not None
        record = Record(question.conversation, question.turn, time.perf_counter() - origin)
        record.prompt_ids, record.token_ids = question.token_ids, []
        record.prompt_tokens = len(question.token_ids)
        if broken:
            record.failure, record.error = "not_sent", broken
            end(question, record)
            return
        params = SamplingParams(
            max_tokens=question.max_tokens,
            temperature=sampling.temperature,
            seed=sampling.seed + 1_000 * question.conversation + question.turn,
            ignore_eos=exact,
        )
        name = f"{question.conversation}.{question.turn}"
        try:
            engine.add_request(name, question.token_ids, params)
        except InputError as error:
            record.failure, record.error = "engine", str(error)
            end(question, record)
            return
        open_[name] = question, record

    def refill() -> None:
        while len(open_) < concurrency and (conversation := next(waiting, None)) is not None:
            ask(questions.first(conversation))

    refill()
    while open_:
        try:
            outputs = engine.step()
        except Exception as error:  # whatever it is, it is a result and belongs into the report
            broken = f"{type(error).__name__}: {error}"[:500]
            for question, record in [open_.pop(name) for name in list(open_)]:
                record.failure, record.error = "engine", broken
                end(question, record)
            refill()
            break
        now = time.perf_counter() - origin
        for output in outputs:
            question, record = open_[output.request_id]
            assert record.token_ids is not None
            if record.token_ids:
                record.itls.append(now - record.start - record.latency)
            else:
                record.ttft = now - record.start
            record.token_ids.extend(output.new_token_ids)
            record.latency = now - record.start
            if output.finished:
                record.output_tokens = len(record.token_ids)
                record.finish_reason = output.finish_reason
                del open_[output.request_id]
                end(question, record)
        refill()
    run.duration = time.perf_counter() - origin
    run.num_skipped = questions.num_skipped - skipped_before
    run.spec = SpecMetrics()
    run.spec.merge(engine.stats.spec)
    run.cache_queries, run.cache_hits = engine.stats.prefix_cache_queries, engine.stats.prefix_cache_hits
    run.sort()
    return run
