"""Data from a server that fails, stalls, refuses, tells no token ids, or is another model's."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing

import pytest

from peagle.data.answers import AnswerSettings
from peagle.data.dataset import open_dataset
from peagle.data.endpoint_retries import EndpointSettings
from peagle.data.endpoint_target import open_endpoint
from peagle.data.generate import generate
from peagle.data.job import GenerateJob
from peagle.data.prompts import load_prompts
from peagle.data.self_prompts import SelfPromptGroup, SelfPromptSettings
from peagle.errors import InputError
from tests.data.conftest import END
from tests.data.fake_endpoint import Reply, fake_endpoint

CONFIG = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 400,
    "eos_token_id": END,
}
COUNT = 12


@pytest.fixture
def folder(tmp_path, chat):
    """The target's folder, with no weights in it, beside a file of prompts."""
    chat.tokenizer.save_pretrained(tmp_path / "tiny")
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(CONFIG))
    rows = [{"prompt": f"Tell me story number {i} about the sea."} for i in range(COUNT)]
    (tmp_path / "ships.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def story(chat):
    return [*chat.encode(" A story."), END]


def run(folder, fake, concurrency=4, said=None, url=None, settings=None, **job):
    job = GenerateJob(
        folder / "answers", **({"prompts": (str(folder / "ships.jsonl"),), "answers": AnswerSettings()} | job)
    )
    quick = {"first_delay": 0.02, "stall_timeout": 0.4, "max_retries": 2} | (settings or {})
    where = EndpointSettings(url or fake.url, "", **quick)
    engines = []

    def open_target():
        target, engine = open_endpoint(job, str(folder / "tiny"), where, concurrency, None, lambda _: None)
        engines.append(engine)
        return target

    try:
        report = generate(job, open_target, (said if said is not None else []).append)
    finally:
        for engine in engines:
            engine.close()
    return report, engines[0]


def number_of(body, chat):
    """Which of the prompts a request asks."""
    text = chat.tokenizer.decode(body["prompt"])
    return int(text.partition("number ")[2].partition(" ")[0]) if "number " in text else -1


def refused_lines(folder):
    return [json.loads(line) for line in (folder / "answers" / "refused.jsonl").read_text().splitlines()]


def test_so_many_at_once_and_no_more(folder, chat, story):
    with fake_endpoint(lambda body, n: Reply(story, delay=0.05), chat.tokenizer.decode) as fake:
        report, engine = run(folder, fake, concurrency=3)
    assert fake.most_at_once == 3
    assert (report.conversations, report.answers) == (COUNT, COUNT)
    assert engine.line() == ""
    dataset = open_dataset(folder / "answers")
    assert all(example.input_ids.tolist()[-len(story) :] == story for example in dataset)
    assert len(dataset) == COUNT


FAILURES = {
    "429": Reply(status=429, message="later"),
    "503": Reply(status=503),
    "500": Reply(status=500),
    "stall": Reply([70, 71, END], stall=1.0),
    "broken stream": Reply([70, 71, END], finish="abort"),
    "no piece": Reply([70, END], raw={"choices": [{"token_ids": [None]}]}),
    "an error": Reply([70, END], raw={"error": {"message": "the engine died", "code": 500}}),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_what_fails_is_tried_again(folder, chat, story, kind):
    def reply(body, n):
        return FAILURES[kind] if number_of(body, chat) == 5 and n < 2 else Reply(story)

    with fake_endpoint(reply, chat.tokenizer.decode) as fake:
        report, engine = run(folder, fake)
    assert report.conversations == COUNT
    assert engine.retries == {kind if kind in ("429", "503", "500", "stall") else "broken stream": 2}
    assert open_dataset(folder / "answers").answer_lengths.tolist() == [len(story)] * COUNT


def test_a_broken_connection_is_tried_again(folder, chat, story):
    def reply(body, n):
        return Reply(story, cut=number_of(body, chat) == 5 and n == 0)

    with fake_endpoint(reply, chat.tokenizer.decode) as fake:
        report, engine = run(folder, fake)
    assert report.conversations == COUNT
    assert sum(engine.retries.values()) == 1


def test_retry_after_is_waited_for(folder, chat, story):
    def reply(body, n):
        wait = number_of(body, chat) == 5 and n == 0
        return Reply(status=429, headers={"Retry-After": "0.7"}) if wait else Reply(story)

    with fake_endpoint(reply, chat.tokenizer.decode) as fake:
        run(folder, fake)
    asked = [at for prompt, at in zip(fake.seen, fake.times, strict=True) if fake.seen.count(prompt) == 2]
    assert len(asked) == 2
    assert asked[1] - asked[0] >= 0.7


def test_a_full_server_is_waited_for_as_long_as_it_answers(folder, chat, story):
    """More 429s than a request may be tried again, but others are answered between them."""
    lock, served = threading.Lock(), []

    def reply(body, n):
        if number_of(body, chat) == 5:
            return Reply(status=429) if len(served) < COUNT - 1 else Reply(story)
        time.sleep(0.05)
        with lock:
            served.append(body["prompt"])
        return Reply(story)

    with fake_endpoint(reply, chat.tokenizer.decode) as fake:
        report, _ = run(folder, fake, concurrency=2, settings={"longest_delay": 0.08, "max_retries": 4})
    assert report.conversations == COUNT


def test_refusals_are_kept_apart_and_not_asked_again(folder, chat, story):
    refused = {3: 400, 7: 413}

    def reply(body, n):
        number = number_of(body, chat)
        return Reply(status=refused[number], message=f"not {number}") if number in refused else Reply(story)

    said = []
    with fake_endpoint(reply, chat.tokenizer.decode) as fake:
        report, _ = run(folder, fake, said=said)
        assert report.conversations == COUNT - 2
        assert report.skipped == {"refused by the server": 2}
        assert "2 refused by the server" in "".join(said)
        assert max(map(fake.seen.count, fake.seen)) == 1, "a refusal is not tried again"
        lines = {line["message"]: line for line in refused_lines(folder)}
        assert {message: line["status"] for message, line in lines.items()} == {"not 3": 400, "not 7": 413}
        prompts = load_prompts([str(folder / "ships.jsonl")])
        ids = {prompt.prompt_id for prompt in prompts if "number 3 " in prompt.turns[0]}
        assert {lines["not 3"]["prompt_id"]} == ids
        assert len(open_dataset(folder / "answers")) == COUNT - 2

        asked = len(fake.seen)
        report, _ = run(folder, fake)
        assert len(fake.seen) == asked
        assert report.skipped == {"answered before": COUNT - 2, "refused before": 2}

        refused.clear()
        report, _ = run(folder, fake, retry_refused=True)
        assert report.conversations == 2
    assert len(open_dataset(folder / "answers")) == COUNT
    assert not (folder / "answers" / "refused.jsonl").exists()


def test_a_refusal_in_the_stream(folder, chat, story):
    refusal = Reply([70, END], raw={"error": {"message": "too long", "code": 400}})
    with fake_endpoint(
        lambda body, n: refusal if number_of(body, chat) == 3 else Reply(story), chat.tokenizer.decode
    ) as fake:
        report, _ = run(folder, fake)
    assert report.conversations == COUNT - 1
    assert [(line["status"], line["message"]) for line in refused_lines(folder)] == [(400, "too long")]


def test_a_content_filter_is_a_refusal(folder, chat, story):
    def reply(body, n):
        return Reply(story[:2], finish="content_filter" if number_of(body, chat) == 3 else "length")

    with fake_endpoint(reply, chat.tokenizer.decode) as fake:
        report, _ = run(folder, fake)
    assert report.conversations == COUNT - 1
    assert [(line["status"], line["message"]) for line in refused_lines(folder)] == [(200, "content_filter")]


def test_a_refused_later_turn_leaves_the_conversation_out(folder, chat, story):
    rows = [{"turns": [f"Tell me story number {i}", f"And then, number {i + 100} please?"]} for i in range(4)]
    (folder / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def reply(body, n):
        later = "number 102 " in chat.tokenizer.decode(body["prompt"])
        return Reply(status=400, message="no") if later else Reply(story)

    with fake_endpoint(reply, chat.tokenizer.decode) as fake:
        report, _ = run(folder, fake, prompts=(str(folder / "two.jsonl"),))
    assert (report.conversations, report.answers) == (3, 7)
    assert [(line["turn"], line["status"]) for line in refused_lines(folder)] == [(2, 400)]


def test_a_refused_user_turn_ends_the_conversation_before_it(folder, chat, story):
    def reply(body, n):
        return Reply(status=400, message="no") if body.get("stop_token_ids") else Reply(story)

    with fake_endpoint(reply, chat.tokenizer.decode) as fake:
        report, _ = run(
            folder, fake, answers=AnswerSettings(turns=2, max_tokens=50), turns=SelfPromptSettings(max_tokens=50)
        )
    assert (report.conversations, report.answers, report.skipped) == (COUNT, COUNT, {})
    assert not (folder / "answers" / "refused.jsonl").exists()


def test_a_prompt_that_always_fails_does_not_end_the_run(folder, chat, story):
    broken = [5]

    def reply(body, n):
        return Reply(status=500) if number_of(body, chat) in broken else Reply(story)

    with fake_endpoint(reply, chat.tokenizer.decode) as fake:
        report, _ = run(folder, fake)
        assert report.conversations == COUNT - 1
        assert report.skipped == {"unanswered by the server": 1}
        assert not (folder / "answers" / "refused.jsonl").exists()
        broken.clear()
        report, _ = run(folder, fake)
    assert report.conversations == 1


def test_a_server_that_goes_down_leaves_what_was_done(folder, chat, story):
    up = threading.Event()

    def reply(body, n):
        return Reply(story) if up.is_set() or len(fake.seen) <= 5 else Reply(status=503, message="shutting down")

    with fake_endpoint(reply, chat.tokenizer.decode) as fake:
        with pytest.raises(InputError, match=r"no answer in 3 tries; .* 503: shutting down; the same command goes on"):
            run(folder, fake)
        before = len(open_dataset(folder / "answers"))
        assert 0 < before < COUNT
        up.set()
        report, _ = run(folder, fake)
    assert report.conversations == COUNT - before
    dataset = open_dataset(folder / "answers")
    assert len(set(dataset.prompt_ids)) == len(dataset) == COUNT


@pytest.mark.parametrize("kind", ["refused", "unanswered"])
def test_nothing_answered_is_an_error_that_says_why(folder, chat, story, kind):
    """Two prompts: too few for a run to give a server up that answers none of them."""
    bad, well = Reply(status=400 if kind == "refused" else 500, message="out of order"), []
    some = {"prompts": (f"{folder / 'ships.jsonl'}:limit=2",)}

    def reply(body, n):
        return Reply(story) if well or body["max_tokens"] == 1 else bad  # the probe asks for one token

    with fake_endpoint(reply, chat.tokenizer.decode) as fake:
        with pytest.raises(
            InputError, match=rf"none of the prompts was answered: 2 {kind} by the server; .*out of order"
        ):
            run(folder, fake, **some)
        if kind == "refused":
            with pytest.raises(InputError, match=r"was answered: 2 refused before; .* with --retry-refused all"):
                run(folder, fake, **some)
        well.append(True)
        report, _ = run(folder, fake, retry_refused=kind == "refused", **some)
        assert report.conversations == 2
        bad.status = 400
        well.clear()
        assert run(folder, fake, **some)[0].skipped == {"answered before": 2}, "nothing was left to ask"
    assert len(open_dataset(folder / "answers")) == 2


def test_a_server_that_is_given_up_leaves_the_counts(folder, chat, story):
    def reply(body, n):
        bad = Reply(status=400 if number_of(body, chat) == 5 else 503)
        return Reply(story) if body["max_tokens"] == 1 else bad

    some = {"prompts": (f"{folder / 'ships.jsonl'}:where=prompt=Tell me story number 5 about the sea.",)}
    with fake_endpoint(reply, chat.tokenizer.decode) as fake:
        with pytest.raises(InputError, match="none of the prompts was answered: 1 refused"):
            run(folder, fake, **some)
        with pytest.raises(InputError, match=r"goes on from here \(in this run: 0 conversations, .* 1 refused before"):
            run(folder, fake)


def test_nobody_there(folder, chat, story):
    with fake_endpoint(lambda body, n: Reply(story), chat.tokenizer.decode) as fake:
        url = fake.url
    with pytest.raises(InputError, match=r"no answer from /v1/models"):
        run(folder, fake)
    assert not (folder / "answers").exists()
    with pytest.raises(InputError, match="begins with http"):
        run(folder, fake, url=url.removeprefix("http://"))


def test_texts_without_token_ids_are_tokenised_anew(folder, chat, story):
    half = chat.encode("é")[0]  # no whole character: its text is not what it was
    special = {
        1: Reply([70, half, 71, END]),
        2: Reply([70, 1, 71, END]),  # a special token in the middle, which the text does not show
        3: Reply([70, 71], finish="length"),
        4: Reply(story, answer_counted=len(story) - 1),  # the end token not counted
    }
    with fake_endpoint(
        lambda body, n: special.get(number_of(body, chat), Reply(story)), chat.tokenizer.decode, text_only=True
    ) as fake:
        report, engine = run(folder, fake)
    assert not engine.gives_token_ids
    assert report.conversations == COUNT - 2
    dataset = open_dataset(folder / "answers")
    expected = {"length": [70, 71], "stop": story}
    for example, reason in zip(dataset, dataset.finish_reasons, strict=True):
        assert example.input_ids[example.answer_mask].tolist() == expected[reason]
    assert sorted(dataset.finish_reasons) == ["length"] + ["stop"] * (COUNT - 3)
    messages = sorted(line["message"] for line in refused_lines(folder))
    assert len(messages) == 2
    assert any("counts 4 tokens, its answer comes to 3" in message for message in messages)
    assert {line["status"] for line in refused_lines(folder)} == {None}
    assert not dataset.metadata["generation"][0]["served_by"]["token_ids"]


def test_loops_in_texts_are_cut_where_the_engine_would_have_ended_them(folder, chat, story):
    with fake_endpoint(lambda body, n: Reply([70] * 150, "length"), chat.tokenizer.decode, text_only=True) as fake:
        report, _ = run(folder, fake, answers=AnswerSettings(loop_limit=40))
    assert report.loops == COUNT
    dataset = open_dataset(folder / "answers")
    assert set(dataset.finish_reasons) == {"loop"}
    assert set(dataset.answer_lengths.tolist()) == {64}


def test_a_server_that_refuses_fields_of_vllm(folder, chat, story):
    with fake_endpoint(lambda body, n: Reply(story), chat.tokenizer.decode, strict=True) as fake:
        report, engine = run(folder, fake)
        assert (report.conversations, engine.extensions) == (COUNT, False)
        with pytest.raises(InputError, match="refuses top_k"):
            run(folder, fake, answers=AnswerSettings(top_k=5))
        with pytest.raises(InputError, match="refuses stop_token_ids: expected no --self-prompts"):
            run(folder, fake, self_prompts=(SelfPromptGroup(3),))


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply([70, END], prompt_counted=7), r"counted 7 prompt tokens where \d+ were sent"),
        (Reply([70, END], prompt_told=[70, 71]), "read other prompt tokens than were sent"),
        (Reply([70, 400, END]), "token id 400, outside the target's vocabulary of 300"),
        (Reply(status=401, message="no key"), "401: no key"),
        (Reply(status=400, message="only text"), r"refuses a completion of token ids \(400: only text\)"),
        (Reply(status=503), "no answer in 3 tries"),
    ],
)
def test_a_server_that_is_not_the_targets(folder, chat, reply, message):
    with (
        fake_endpoint(lambda body, n: reply, lambda ids: "x") as fake,
        pytest.raises(InputError, match=message),
    ):
        run(folder, fake)


def test_killed_and_run_again(folder, chat, story):
    """SIGKILL in the middle: whole shards are there, the same command goes on with the rest."""
    arguments = [str(folder / "tiny"), "-o", str(folder / "answers"), "--prompts", str(folder / "ships.jsonl")]
    arguments += ["--concurrency", "2", "--rows-per-shard", "2", "--endpoint"]
    with fake_endpoint(lambda body, n: Reply(story, delay=0.3), chat.tokenizer.decode) as fake:
        command = [sys.executable, "-m", "peagle", "data", "generate", *arguments, f"{fake.url}/v1/"]
        killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while not list((folder / "answers").glob("answers-*.parquet")):
            assert killed.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        kept = len(open_dataset(folder / "answers"))
        assert 0 < kept < COUNT
        asked = len(fake.seen)
        report, _ = run(folder, fake, concurrency=COUNT, settings={"stall_timeout": 5.0})
    assert report.conversations == COUNT - kept == len(fake.seen) - asked
    dataset = open_dataset(folder / "answers")
    assert len(set(dataset.prompt_ids)) == len(dataset) == COUNT


def test_an_interrupt_keeps_what_is_done_and_leaves_no_task_behind(folder, chat, story):
    with fake_endpoint(lambda body, n: Reply(story, delay=0.05), chat.tokenizer.decode) as fake:
        job = GenerateJob(folder / "answers", prompts=(str(folder / "ships.jsonl"),))
        target, engine = open_endpoint(
            job, str(folder / "tiny"), EndpointSettings(fake.url, ""), 2, None, lambda _: None
        )
        steps, step = [], engine.step

        def interrupted():
            steps.append(1)
            if len(steps) > 3:
                raise KeyboardInterrupt
            return step()

        engine.step = interrupted
        with closing(engine), pytest.raises(KeyboardInterrupt):
            generate(job, lambda: target, lambda _: None)
    assert 0 < len(open_dataset(folder / "answers")) < COUNT
