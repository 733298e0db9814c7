"""Random requests of many clients, some of which leave, and what each of them should have got."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from peagle.engine.engine import Engine
from peagle.engine.parity import first_divergence
from peagle.engine.sampling_params import SamplingParams

Leaves = Literal["never", "at once", "in the middle", "impatiently"]


@dataclass
class Ask:
    """One HTTP request. params: those of SamplingParams; extra: the rest of the body."""

    path: str
    extra: dict[str, Any]
    params: dict[str, Any]
    n: int = 1
    stream: bool = False
    leaves: Leaves = "never"
    chunks: int = 0  # how many it reads before it leaves

    @property
    def body(self) -> dict[str, Any]:
        return self.extra | self.params | {"n": self.n, "stream": self.stream, "return_token_ids": True}


@dataclass
class Got:
    """One choice as it came; values: the logprobs of its tokens, those of an echoed prompt included."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    reason: str = ""
    values: list[float | None] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)


def make_asks(
    dice: random.Random, count: int, prompts: Sequence[list[int]], stops: Sequence[str], longest: int
) -> list[Ask]:
    """Requests of every kind. prompts: as token ids; of each a random beginning is taken, so that beginnings repeat."""
    asks = []
    for i in range(count):
        params: dict[str, Any] = {
            "max_tokens": dice.randint(1, longest),
            "temperature": dice.choice([0.0, 0.0, 0.7, 1.0]),
            "top_p": dice.choice([1.0, 0.9]),
            "top_k": dice.choice([0, 5, 20]),
            "min_p": dice.choice([0.0, 0.0, 0.05]),
            "seed": i,
            "ignore_eos": dice.random() < 0.5,
            "num_speculative_tokens": dice.choice([None, None, None, 0, 1]),
        }
        if dice.random() < 0.3:
            params["stop"] = dice.sample(stops, 3)
            params["include_stop_str_in_output"] = dice.random() < 0.5
        if dice.random() < 0.2:
            params |= {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.3}
        if dice.random() < 0.2:
            params["logit_bias"] = {str(dice.choice(prompts)[0]): 3.0}
        if dice.random() < 0.2:
            params["min_tokens"] = params["max_tokens"] // 2
        ask = Ask("/v1/completions", {}, params, dice.choice([1, 1, 1, 2, 3]), dice.random() < 0.5)
        if dice.random() < 0.2:
            ask.path = "/v1/chat/completions"
            words = "".join(chr(97 + dice.randrange(26)) for _ in range(dice.randint(1, 40)))
            ask.extra["messages"] = [{"role": "user", "content": words}]
            if dice.random() < 0.3:
                ask.extra |= {"logprobs": True, "top_logprobs": 2}
        else:
            prompt = dice.choice(prompts)
            ask.extra["prompt"] = prompt[: dice.randint(1, len(prompt))]
            if dice.random() < 0.3:
                ask.extra |= {"logprobs": 1, "echo": dice.random() < 0.5}
        ask.leaves = dice.choice(["never"] * 6 + ["at once", "in the middle", "in the middle", "impatiently"])
        ask.stream |= ask.leaves == "in the middle"
        ask.chunks = dice.randint(1, 8)
        asks.append(ask)
    return asks


def send_all(url: str, asks: Sequence[Ask], clients: int) -> list[list[Got] | None]:
    """All requests, from so many clients at a time; None for those that left."""
    with (
        httpx.Client(base_url=url, timeout=600, limits=httpx.Limits(max_connections=clients)) as client,
        ThreadPoolExecutor(clients) as pool,
    ):
        return list(pool.map(lambda ask: send(client, ask), asks))


def send(client: httpx.Client, ask: Ask) -> list[Got] | None:
    if ask.leaves in ("at once", "impatiently"):
        patience = 0.001 if ask.leaves == "at once" else 0.05 * ask.chunks
        with contextlib.suppress(httpx.TimeoutException):
            client.post(ask.path, json=ask.body, timeout=httpx.Timeout(600, read=patience))
        return None
    choices = [Got() for _ in range(ask.n)]
    if not ask.stream:
        answer = client.post(ask.path, json=ask.body)
        assert answer.status_code == 200, answer.text
        take(choices, answer.json())
        return choices
    with client.stream("POST", ask.path, json=ask.body) as answer:
        assert answer.status_code == 200, answer.read()
        left = ask.chunks
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                take(choices, json.loads(line[6:]))
                left -= 1
            if ask.leaves == "in the middle" and left == 0:
                return None
    return None if ask.leaves == "in the middle" else choices


def take(choices: list[Got], part: dict[str, Any]) -> None:
    """Add a whole answer, or one chunk of it, to what has come."""
    assert "error" not in part, part
    for choice in part["choices"]:
        got = choices[choice["index"]]
        content = choice.get("message") or choice.get("delta")
        got.text += choice["text"] if content is None else content.get("content") or ""
        got.token_ids += choice.get("token_ids") or []
        got.reason = choice["finish_reason"] or got.reason
        got.prompt_ids = choice.get("prompt_token_ids") or got.prompt_ids
        if logprobs := choice["logprobs"]:
            content = logprobs.get("content")
            got.values += logprobs["token_logprobs"] if content is None else [entry["logprob"] for entry in content]
    if ids := part.get("prompt_token_ids"):
        for got in choices:
            got.prompt_ids = ids


def expected(
    engine: Engine, ask: Ask, prompt_ids: list[int], choice: int, bias: Mapping[int, float] | None = None
) -> Got:
    """What the engine gives for one choice when nothing else runs; bias: added to the request's own logit_bias."""
    logprobs = ask.extra.get("logprobs")
    wanted = ask.extra["top_logprobs"] if logprobs is True else logprobs
    echo = ask.extra.get("echo", False)
    own = {int(token): value for token, value in ask.params.get("logit_bias", {}).items()}
    changed: dict[str, Any] = {"seed": ask.params["seed"] + choice}
    if bias is not None:
        changed["logit_bias"] = {token: own.get(token, 0) + bias.get(token, 0) for token in {*own, *bias}}
    params = SamplingParams(**ask.params | changed, logprobs=wanted, prompt_logprobs=wanted if echo else None)
    request = engine.add_request("one", prompt_ids, params)
    while engine.has_unfinished:
        engine.step()
    ids = request.output_token_ids
    values: list[float | None] = [at[token].logprob for token, at in zip(ids, request.logprobs or (), strict=False)]
    text = engine.text(request)
    if echo:
        if wanted is not None:
            assert request.prompt_logprobs is not None
            known = zip(prompt_ids, request.prompt_logprobs, strict=True)
            values = [*(None if at is None else at[token].logprob for token, at in known), *values]
        text = engine.target.tokenizer.decode(prompt_ids) + text
    return Got(text, ids, str(request.finish_reason), values, prompt_ids)


def is_tie(engine: Engine, ask: Ask, choice: int, got: Got, known: Got) -> bool:
    """Whether the first difference is one that rounding decides: a thousandth more or less for the two tokens' logits
    makes the engine take the other one."""
    at = first_divergence(known.token_ids, got.token_ids)
    if at is None or at.reference_id is None or at.other_id is None:
        return False
    return any(
        expected(engine, ask, got.prompt_ids, choice, {at.reference_id: -sign * 1e-3, at.other_id: sign * 1e-3})
        .token_ids[: at.index + 1] == got.token_ids[: at.index + 1]
        for sign in (1, -1)
    )  # fmt: skip


def differences(
    engine: Engine, asks: Sequence[Ask], answers: Sequence[list[Got] | None], within: float
) -> tuple[list[str], int]:
    """Where the answers are not what the engine gives each choice alone, and how many differ by a tie only.

    within: how far two logprobs may be apart.
    """
    found, ties = [], 0
    for number, (ask, answer) in enumerate(zip(asks, answers, strict=True)):
        for index, got in enumerate(answer or ()):
            known = expected(engine, ask, got.prompt_ids, index)
            same = (got.text, got.token_ids, got.reason) == (known.text, known.token_ids, known.reason)
            same &= len(got.values) == len(known.values)
            for ours, theirs in zip(got.values, known.values, strict=False):
                same &= ours is theirs is None or abs(float(ours or 0) - max(float(theirs or 0), -9999)) <= within
            if same:
                continue
            if is_tie(engine, ask, index, got, known):
                ties += 1
            else:
                found.append(f"request {number}, choice {index}: {got}\nexpected {known}\nof {ask.body}")
    return found, ties
