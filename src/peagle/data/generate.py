"""The whole of `peagle data generate`: prompts read and written, evaluation prompts kept out, answers into a folder."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from peagle.data.answers import TOO_LONG, AnswerReport, write_answers
from peagle.data.chat_format import ChatFormat
from peagle.data.contamination import ContaminationGuard, DropReport
from peagle.data.job import GenerateJob, check_job, file_name, group_turns, in_part
from peagle.data.metadata import target_facts
from peagle.data.prompts import Prompt, load_prompts
from peagle.data.refusals import RefusalFile
from peagle.data.request_queue import EndpointError, EngineLike
from peagle.data.self_prompt_file import SelfPromptFile
from peagle.data.self_prompts import SelfPromptGroup, TurnFilter, stable_seed, write_prompts
from peagle.data.shards import ShardWriter, answered_prompts, prepare_folder, write_counts
from peagle.errors import InputError


@dataclass(frozen=True, slots=True)
class GeneratingTarget:
    """What of a target generation needs. served_by: what `dataset.json` says of the server that answers for it."""

    engine: EngineLike
    tokenizer: Any
    name: str
    vocab_size: int
    max_model_len: int
    end_ids: frozenset[int]
    window: int = 2048
    served_by: dict[str, Any] | None = None


def generate(job: GenerateJob, open_target: Callable[[], GeneratingTarget], say: Callable[[str], None]) -> AnswerReport:
    """Run a job; a rerun of the same job goes on where it was stopped.

    Args:
        open_target: called once files and arguments have been read without an error, since loading takes long.
        say: prints a line.

    Raises:
        InputError: bad settings, prompt or evaluation files, a folder of another target, a full disk, a server that is
            down or answers nothing, prompts that are all longer than the model.
    """
    check_job(job)
    guard = ContaminationGuard.from_files(job.exclude) if job.exclude else None
    if guard is None:
        say("no --exclude given: prompts are not checked against evaluation sets")
    prompts = _clean(load_prompts(job.prompts), guard, say)
    prompts = [prompt for prompt in prompts if in_part(prompt.prompt_id, job.part)]
    target = open_target()
    chat = ChatFormat(target.tokenizer, sorted(target.end_ids), job.template_kwargs)
    facts = target_facts(target.name, target.tokenizer, target.vocab_size)
    described = _described(job) | ({"served_by": target.served_by} if target.served_by else {})
    before = prepare_folder(job.output, facts, described)
    if before and (changes := _changes(before[-1], described)):
        say(f"{job.output}: what was answered there with other settings stays as it is ({'; '.join(changes)})")
    turn_filter = TurnFilter(chat, job.turns, guard)
    for group in job.self_prompts:
        prompts += _self_written(job, group, target, chat, turn_filter, guard, say)
    prompts = list({prompt.prompt_id: prompt for prompt in prompts}.values())  # a target may repeat what a file says
    done = answered_prompts(job.output)
    prefix = "" if job.part[1] == 1 else f"{job.part[0]}of{job.part[1]}"
    writer = ShardWriter(job.output, prefix, job.rows_per_shard)
    refusals = RefusalFile(job.output, prefix, job.retry_refused) if target.served_by else None
    report = write_answers(
        target.engine,
        chat,
        prompts,
        writer,
        job.answers,
        target.max_model_len,
        done,
        turn_filter,
        job.turns,
        target.window,
        refusals,
    )
    write_counts(job.output)
    if turn_filter.report.written:
        say(turn_filter.report.line())
    for line in turn_filter.contaminated.lines():
        say(f"dropped: {line}")
    if report.too_long:
        room = f"longer than the model ({target.max_model_len} tokens, one of them left for the answer)"
        if report.skipped.total() == report.skipped[TOO_LONG] and not report.conversations:
            raise InputError(f"prompts: all are {room}: {report.too_long_line()}")
        say(f"warning: left out, for they are {room}: {report.too_long_line()}")
    say(report.line())
    if refusals is not None and refusals.path.exists():
        say(f"{refusals.path}: what the server refused, and why; --retry-refused asks it again")
    if report.nothing_answered:
        last = f"; one of them: {report.last_failure}" if report.last_failure else ""
        raise EndpointError(
            f"endpoint: none of the prompts was answered: {report.skipped_line()}{last}; the same command asks again "
            "what was not refused, and with --retry-refused all"
        )
    return report


def _clean(prompts: list[Prompt], guard: ContaminationGuard | None, say: Callable[[str], None]) -> list[Prompt]:
    if guard is None:
        return prompts
    dropped = DropReport()
    kept = guard.filter(prompts, dropped)
    say(f"{len(kept)} prompts from files, {len(prompts) - len(kept)} dropped as too close to an evaluation prompt")
    for line in dropped.lines():
        say(f"dropped: {line}")
    return kept


def _self_written(
    job: GenerateJob,
    group: SelfPromptGroup,
    target: GeneratingTarget,
    chat: ChatFormat,
    turn_filter: TurnFilter,
    guard: ContaminationGuard | None,
    say: Callable[[str], None],
) -> list[Prompt]:
    """This part's share of a group. They are kept in a file of the folder, so that a rerun answers the same ones."""
    part, parts = job.part
    count = group.count * part // parts - group.count * (part - 1) // parts
    path = job.output / f"self-prompts-{file_name(group.name)}-{part}of{parts}.jsonl"
    written = SelfPromptFile(path, group.name)
    if written.turns:
        say(f"{path}: {len(written.turns)} self-written prompts kept from an earlier run")
    turn_filter.remember(written.turns)
    if len(written.turns) < count:
        settings = replace(group_turns(job, group), seed=stable_seed(job.turns.seed, part, parts))
        fresh = write_prompts(
            target.engine,
            chat,
            count - len(written.turns),
            group.openings,
            settings,
            turn_filter,
            window=target.window,
            source=group.name,
            attempts=written.attempts,
        )
        try:
            for prompt in fresh:
                written.add(prompt.turns[0])
        finally:
            written.save()
    return _clean(load_prompts([f"{path}:name={group.name}:limit={count}"]), guard, lambda _line: None) if count else []


def _described(job: GenerateJob) -> dict[str, Any]:
    """The job as `dataset.json` records it: no absolute paths, and the same for all parts."""
    described = {
        "prompts": [_without_folder(spec) for spec in job.prompts],
        "self_prompts": [asdict(group) for group in job.self_prompts],
        "exclude": [_without_folder(spec) for spec in job.exclude],
        "answers": asdict(job.answers),
        "self_turns": asdict(job.turns),
        "template_kwargs": job.template_kwargs,
    }
    return dict(json.loads(json.dumps(described)))  # as it will be read back: tuples are lists there


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`setting: before -> now` of what decides how prompts are answered; a setting may be there on one side only."""
    missing = "not given"
    return [
        f"{name}: {before[group].get(name, missing)} -> {now[group].get(name, missing)}"
        for group in ("answers", "self_turns", "template_kwargs")
        if group in before
        for name in {**before[group], **now[group]}
        if before[group].get(name, missing) != now[group].get(name, missing)
    ]


def _without_folder(spec: str) -> str:
    if spec.startswith("hub:"):
        return spec
    location, colon, options = spec.partition(":")
    return location.rpartition("/")[2] + colon + options
