"""Answers from the target: every conversation's turns answered one after another, rows written as they finish."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from tqdm import tqdm

from peagle.data.chat_format import ChatFormat
from peagle.data.prompts import Prompt
from peagle.data.refusals import RefusalFile
from peagle.data.request_queue import NOT_ANSWERED, Completion, EndpointError, EngineLike, RequestQueue
from peagle.data.self_prompts import SelfPromptSettings, TurnFilter, stable_seed, turn_params
from peagle.data.shards import Answer, ShardWriter
from peagle.engine.sampling_params import SamplingParams
from peagle.errors import InputError

TOO_LONG = "longer than the model"
ANSWERED_BEFORE, REFUSED_BEFORE = "answered before", "refused before"
NAMED = 5  # prompts that a message names


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How answers are sampled.

    Attributes:
        temperatures: (temperature, share) pairs; each prompt gets one of them by a hash of its id, or all if `every`.
        loop_limit: end an answer whose last so many tokens repeat themselves, keeping it so far; 0: never.
        turns: user turns a conversation; those that its prompt does not bring are written by the target.
        turns_share: share of the conversations that go on to `turns`; the others end with their own turns.
    """

    temperatures: tuple[tuple[float, float], ...] = ((0.0, 1.0),)
    every: bool = False
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 2048
    loop_limit: int = 256
    turns: int = 1
    turns_share: float = 1.0
    seed: int = 0


@dataclass
class AnswerReport:
    """What a run did; `skipped` counts prompts left out by reason.

    `too_long` names, by prompt id, those that the model has no room for: "FILE:LINE (N tokens)". `last_failure` is what
    a server said, or what became of the request, when it gave no answer; "" if it always did.
    """

    conversations: int = 0
    answers: int = 0
    answer_tokens: int = 0
    cut: int = 0
    loops: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    too_long: dict[str, str] = field(default_factory=dict)
    last_failure: str = ""

    @property
    def nothing_answered(self) -> bool:
        """Whether a server answered nothing of what it was asked, or has refused all that there is before."""
        if self.conversations:
            return False
        if any(self.skipped[f"{reason} by the server"] for reason in NOT_ANSWERED):
            return True
        return self.skipped[REFUSED_BEFORE] > 0 and not self.skipped[ANSWERED_BEFORE]

    def line(self) -> str:
        skipped = f", {self.skipped_line()}" if self.skipped else ""
        return (
            f"{self.conversations} conversations, {self.answers} answers, {self.answer_tokens} answer tokens, "
            f"{self.cut} answers cut at the length limit, {self.loops} cut in a loop{skipped}"
        )

    def skipped_line(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in self.skipped.items())

    def too_long_line(self) -> str:
        """A few of the prompts that the model has no room for, and how many more there are."""
        more = len(self.too_long) - NAMED
        return ", ".join(list(self.too_long.values())[:NAMED]) + (f" and {more} more" if more > 0 else "")


@dataclass(slots=True)
class _Conversation:
    prompt: Prompt
    temperature: float
    turns: int
    input_ids: list[int]
    answer_mask: list[bool]
    answered: int = 0
    asking: bool = False  # the request under way writes a user turn, not an answer
    finish_reason: str = ""


def parse_temperature(text: str) -> tuple[float, float]:
    """Read `T` or `T=SHARE`.

    Raises:
        InputError: not such numbers, a negative temperature or a share that is not above 0.
    """
    value, _, share = text.partition("=")
    try:
        pair = float(value), float(share) if share else 1.0
    except ValueError:
        pair = (-1.0, 0.0)
    if not (0 <= pair[0] < 10 and pair[1] > 0):
        raise InputError(f"--temperature {text!r}: expected T or T=SHARE with T from 0 and SHARE above 0, e.g. 0.8=0.5")
    return pair


def sampling_of(settings: AnswerSettings, temperature: float) -> SamplingParams:
    """Sampling of answers as far as the settings say it. Raises InputError naming a bad one."""
    return SamplingParams(
        max_tokens=settings.max_tokens, temperature=temperature, top_p=settings.top_p, top_k=settings.top_k
    )


def temperatures_of(prompt: Prompt, settings: AnswerSettings) -> list[float]:
    """The temperatures at which a prompt is answered; the same on every run."""
    if settings.every:
        return [temperature for temperature, _ in settings.temperatures]
    point = _fraction(settings.seed, "temperature", prompt.prompt_id) * sum(s for _, s in settings.temperatures)
    for temperature, share in settings.temperatures:
        point -= share
        if point < 0:
            return [temperature]
    return [settings.temperatures[-1][0]]


def write_answers(
    engine: EngineLike,
    chat: ChatFormat,
    prompts: Sequence[Prompt],
    writer: ShardWriter,
    settings: AnswerSettings,
    max_model_len: int,
    done: dict[str, set[float]] | None = None,
    turn_filter: TurnFilter | None = None,
    turn_settings: SelfPromptSettings = SelfPromptSettings(),
    window: int = 2048,
    refusals: RefusalFile | None = None,
) -> AnswerReport:
    """Answer prompts and write rows as conversations finish; on an interrupt, or when a server that is the engine goes
    down, what is complete is written first.

    Args:
        max_model_len: longest sequence of the target; a prompt with no room left is skipped and counted.
        done: prompt ids (with temperatures) answered before; they are skipped.
        turn_filter: judges user turns that the target writes in later turns.
        window: requests kept in the engine, a few times what it batches.
        refusals: where prompts go that a server refuses; those refused before are skipped. A conversation that was
            refused in a later turn is left out as a whole.

    Raises:
        InputError: the disk is full; EndpointError, which is one, for a server that is down.
    """
    report = AnswerReport()
    turn_filter = turn_filter or TurnFilter(chat, turn_settings)
    queue: RequestQueue[_Conversation] = RequestQueue(engine, window, settings.loop_limit)
    todo = _pending(prompts, settings, done or {}, refusals.before if refusals else {}, report)
    bar = tqdm(total=len(todo), desc="answers", unit="conv", dynamic_ncols=True)
    fresh = _start(todo, chat, settings, max_model_len, report, bar)

    def submit(conversation: _Conversation) -> None:
        room = max_model_len - len(conversation.input_ids)
        if conversation.asking:
            params = turn_params(chat, turn_settings, _seed(settings, conversation))
        else:
            params = replace(
                sampling_of(settings, conversation.temperature),
                max_tokens=min(settings.max_tokens, room),
                seed=_seed(settings, conversation),
            )
        prompt = conversation.input_ids
        if conversation.asking:
            prompt = prompt + chat.later_opening(prompt)
        queue.submit(conversation, prompt, params)

    def advance(done: Completion[_Conversation]) -> None:
        conversation = done.tag
        if not done.answered and not conversation.asking:
            report.skipped[f"{done.finish_reason} by the server"] += 1
            report.last_failure = str(done.refusal or "")
            if done.finish_reason == "refused" and done.refusal is not None and refusals is not None:
                turn = conversation.answered + 1
                refusals.add(conversation.prompt, conversation.temperature, turn, done.refusal)
            bar.update()
            return
        if conversation.asking:
            text = turn_filter.keep(done.token_ids, done.finish_reason, once=False)
            goes_on = text is not None and _append_turn(conversation, text, chat, max_model_len)
            conversation.asking = False
        else:
            conversation.input_ids += done.token_ids
            conversation.answer_mask += [True] * len(done.token_ids)
            conversation.answered += 1
            conversation.finish_reason = done.finish_reason
            report.answers += 1
            report.answer_tokens += len(done.token_ids)
            report.cut += done.finish_reason == "length"
            report.loops += done.finish_reason == "loop"
            goes_on = done.finish_reason == "stop" and conversation.answered < conversation.turns
            if goes_on and conversation.answered < len(conversation.prompt.turns):
                words = conversation.prompt.turns[conversation.answered]
                goes_on = _append_turn(conversation, words, chat, max_model_len)
            elif goes_on:
                conversation.asking = True
                # Room for the user turn and for an answer that is not cut short by the model's length most of the time.
                needed = turn_settings.max_tokens + settings.max_tokens // 4
                goes_on = len(conversation.input_ids) + needed <= max_model_len
        if goes_on:
            submit(conversation)
            return
        writer.add(_row(conversation))
        report.conversations += 1
        bar.update()

    try:
        while True:
            while queue.has_room and (conversation := next(fresh, None)) is not None:
                submit(conversation)
            if not len(queue):
                break
            for completion in queue.step():
                advance(completion)
            rate = queue.generated / max(bar.format_dict["elapsed"], 1e-9)
            bar.set_postfix_str(f"{rate:,.0f} tok/s, {queue.generated / 1e6:.2f}M tokens", refresh=False)
    except KeyboardInterrupt:
        writer.flush()
        raise
    except EndpointError as error:
        writer.flush()
        raise EndpointError(f"{error} (in this run: {report.line()})") from error
    finally:
        bar.close()
    writer.flush()
    return report


def _pending(
    prompts: Iterable[Prompt],
    settings: AnswerSettings,
    done: dict[str, set[float]],
    refused: dict[str, set[float]],
    report: AnswerReport,
) -> list[tuple[Prompt, float]]:
    """What is left to answer, in the order of the ids, which are hashes: an interrupted run holds a fair sample."""
    todo = []
    for prompt in sorted(prompts, key=lambda prompt: prompt.prompt_id):
        for temperature in temperatures_of(prompt, settings):
            for known, reason in ((done, ANSWERED_BEFORE), (refused, REFUSED_BEFORE)):
                at = known.get(prompt.prompt_id, set())
                if round(temperature, 4) in at if settings.every else at:
                    report.skipped[reason] += 1
                    break
            else:
                todo.append((prompt, temperature))
    return todo


def _start(
    todo: Iterable[tuple[Prompt, float]],
    chat: ChatFormat,
    settings: AnswerSettings,
    max_model_len: int,
    report: AnswerReport,
    bar: tqdm,
) -> Iterator[_Conversation]:
    for prompt, temperature in todo:
        ids = chat.first_turn(prompt.turns[0], prompt.system)
        if len(ids) >= max_model_len:
            report.skipped[TOO_LONG] += 1
            place = prompt.place or f"prompt {prompt.prompt_id}"
            report.too_long[prompt.prompt_id] = f"{place} ({len(ids)} tokens)"
            bar.update()
            continue
        goes_on = _fraction(settings.seed, "turns", prompt.prompt_id) < settings.turns_share
        turns = max(len(prompt.turns), settings.turns if goes_on else 1)
        yield _Conversation(prompt, temperature, turns, ids, [False] * len(ids))


def _append_turn(conversation: _Conversation, turn: str, chat: ChatFormat, max_model_len: int) -> bool:
    """Append a user turn and the opening of its answer; False, and nothing appended, if that leaves no room."""
    ids = chat.later_turn(turn, conversation.input_ids)
    if len(conversation.input_ids) + len(ids) >= max_model_len:
        return False
    conversation.input_ids += ids
    conversation.answer_mask += [False] * len(ids)
    return True


def _row(conversation: _Conversation) -> Answer:
    return Answer(
        input_ids=conversation.input_ids,
        answer_mask=conversation.answer_mask,
        source=conversation.prompt.source,
        temperature=conversation.temperature,
        finish_reason=conversation.finish_reason,
        prompt_id=conversation.prompt.prompt_id,
    )


def _seed(settings: AnswerSettings, conversation: _Conversation) -> int:
    return stable_seed(
        settings.seed,
        conversation.prompt.prompt_id,
        conversation.temperature,
        conversation.answered,
        conversation.asking,
    )


def _fraction(*parts: object) -> float:
    return stable_seed(*parts) / 2**31
