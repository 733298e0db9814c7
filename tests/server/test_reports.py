"""Reports of logprobs: how large they may be, and that others are served while they are written."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from peagle.engine.outputs import Logprob
from peagle.server import answers, json_parts
from peagle.server.answers import MAX_REPORTED, UNKNOWN_LENGTH, Answer, Echo
from peagle.server.calls import Update
from peagle.target import Target
from tests.server.conftest import Running, Start, tiny_engine

PROMPT = [30, 40, 50, 60, 35]
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("body", "most", "param"),
    [
        # 5 of the prompt and 2 of the answer, in each of the choices
        ({"prompt_logprobs": 2, "n": 3}, 45, "prompt_logprobs"),
        ({"prompt": [PROMPT, [1, 2]], "prompt_logprobs": 2, "n": 2}, 42, "prompt_logprobs"),
        ({"logprobs": 2, "n": 3}, 18, "logprobs"),
        ({"logprobs": 2, "n": 3, "echo": True}, 63, "logprobs"),
        ({"logprobs": 2, "n": 3, "echo": True, "max_tokens": 0}, 45, "logprobs"),
        ({"logprobs": 2, "n": 3, "echo": True, "stream": True}, 45, "logprobs"),
        ({"logprobs": 0, "prompt_logprobs": 2, "echo": True}, 17, "prompt_logprobs"),
        ({"logprobs": 2, "prompt_logprobs": 0, "max_tokens": 9}, 32, "logprobs"),
    ],
)
def test_a_report_at_the_limit(
    server: Running, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], most: int, param: str
) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0} | body
    monkeypatch.setattr("peagle.server.app.MAX_REPORTED", most)
    assert server.post("/v1/completions", asked).status_code == 200
    monkeypatch.setattr("peagle.server.app.MAX_REPORTED", most - 1)
    answer = server.post("/v1/completions", asked)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(f"{param}: got up to {most} tokens to report (")
    assert error["message"].endswith(f"expected at most {most - 1}")
    server.settle()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"logprobs": True, "top_logprobs": 2, "max_tokens": 9, "n": 2}, "top_logprobs"),
        ({"logprobs": True, "max_tokens": 54}, "logprobs"),
        ({"prompt_logprobs": 20, "max_tokens": 1}, "prompt_logprobs"),
    ],
)
def test_a_chats_field_is_named(
    server: Running, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], param: str
) -> None:
    monkeypatch.setattr("peagle.server.app.MAX_REPORTED", 53)
    answer = server.post("/v1/chat/completions", CHAT | body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_what_must_be_possible() -> None:
    long = list(range(8191))
    for n in (1, 2):
        for echo in (None, Echo(["x"], ["x"])):
            both = Answer("text", "m", [long], n=n, top_logprobs=20, prompt_logprobs=20, echo=echo)
            assert sum(both.reported(1, 20)) <= MAX_REPORTED
    # without max_tokens, on a server of any length
    assert sum(Answer("chat", "m", [[1]], top_logprobs=20).reported(None, 20)) == UNKNOWN_LENGTH * 21 <= MAX_REPORTED
    # a chat has its prompt's report once
    assert Answer("chat", "m", [[1, 2]], n=64, prompt_logprobs=20).reported(None, 20) == (42, 0)
    assert sum(Answer("text", "m", [long[:3000]], n=64, prompt_logprobs=20).reported(1, 20)) > MAX_REPORTED
    # the engine refuses what is more than its limit, whoever counts it as that
    assert Answer("chat", "m", [[1]], top_logprobs=10**9).reported(2, 20) == (0, 42)


def test_no_limit_where_there_is_none_a_position(start: Start, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(tiny_engine(target, max_logprobs=-1))
    monkeypatch.setattr("peagle.server.app.MAX_REPORTED", 1)
    body = {"prompt": PROMPT, "prompt_logprobs": -1, "max_tokens": 1}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    assert {len(position) for position in choice["prompt_logprobs"][1:]} == {target.vocab_size}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["text", "chat"])
def test_pieces_make_the_whole(server: Running, monkeypatch: pytest.MonkeyPatch, kind: str, stream: bool) -> None:
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 7, "n": 2, "return_token_ids": True, "stream": stream}
    if kind == "text":
        path = "/v1/completions"
        body |= {"prompt": [PROMPT, [33, 44]], "echo": True, "logprobs": 2}
    else:
        path = "/v1/chat/completions"
        body |= CHAT | {"logprobs": True, "top_logprobs": 2} | ({} if stream else {"prompt_logprobs": 1})

    def ask() -> list[Any]:
        text = server.post(path, body).text
        events = [line[6:] for line in text.split("\n\n") if line[6:] not in ("", "[DONE]")] if stream else [text]
        parts = [json.loads(event) for event in events]
        for part in parts:
            part["id"] = part["created"] = None
        return sorted(parts, key=lambda part: part["choices"][0]["index"])

    expected = ask()
    for slice_of in (1, 5):
        for module in (answers, json_parts):
            monkeypatch.setattr(module, "SLICE", slice_of)
        got = ask()
        if not stream:
            assert got == expected
        else:  # how a stream is cut is the steps' business
            assert [part["choices"][0].get("prompt_logprobs") for part in got if "prompt_token_ids" in str(part)]
            for index in range(4 if kind == "text" else 2):
                assert listed(got, index) == listed(expected, index)


def listed(parts: list[Any], index: int) -> list[Any]:
    """All that a stream reports of a choice, one entry a token."""
    found: list[Any] = []
    for choice in (part["choices"][0] for part in parts):
        if choice["index"] == index and (report := choice["logprobs"]):
            found += report["content"] if "content" in report else zip(*report.values(), strict=True)
    return found


class Turns:
    """Counts how often the event loop serves another task."""

    count = 0

    async def run(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_others_are_served_while_a_report_is_written(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    """And a prompt's report is made once, though three answers have it."""
    position = {token: Logprob(-1.0, token + 1, "x") for token in range(4)}
    reported = [None, *[position] * 39]
    positions: list[Any] = [position] * 40
    made: list[int] = []
    for name in ("prompt_logprobs", "text_logprobs", "chat_logprobs"):
        build = getattr(answers, name)

        def noted(part: Any, *rest: Any, build: Any = build) -> Any:
            made.append(len(part))
            return build(part, *rest)

        monkeypatch.setattr(answers, name, noted)
    for module in (answers, json_parts):
        monkeypatch.setattr(module, "SLICE", 16)

    class Ended:
        jobs = tuple(SimpleNamespace(index=index) for index in range(3))

        async def __aiter__(self) -> Any:
            for index in range(3):
                first = reported if index == 0 else None
                yield Update(index, "x", [1] * 40, "length", logprobs=positions, prompt_logprobs=first)

    echo = Echo(["y"], ["y"]) if kind == "text" else None
    answer = Answer(kind, "m", [[1] * 40], n=3, top_logprobs=2, prompt_logprobs=3, echo=echo)

    async def write() -> tuple[Any, int]:
        turns = Turns()
        other = asyncio.ensure_future(turns.run())
        whole = await answer.whole(Ended())  # type: ignore[arg-type]
        other.cancel()
        return json.loads(whole), turns.count

    whole, turns = asyncio.run(write())
    assert len(whole["choices"]) == 3
    pieces = [count for count in made if count]
    assert max(pieces) == 4  # of 4 tokens each
    # of three answers, of the prompt, and of the prompt once more for its echo
    assert sum(pieces) == 40 * (5 if kind == "text" else 4)
    assert turns >= len(pieces) - 5
