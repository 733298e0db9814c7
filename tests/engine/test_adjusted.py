"""min_p, logit_bias, penalties, logprobs and n under speculation: tokens and reports are those of plain decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.engine import LLM, SamplingParams, runner
from peagle.engine.adjust import Penalties, penalise
from peagle.engine.request import Request
from peagle.engine.sampler import SamplingRows, choose
from peagle.errors import InputError
from peagle.target import Target
from tests.engine.helpers import ASCII, SEQUENCES, drain, make_engine, replay, run, tiny_head

TOKENS = 14
PARAMS = [
    SamplingParams(max_tokens=TOKENS, ignore_eos=True, **settings)
    for settings in (
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.8, "logprobs": 3},
        {"temperature": 1.0, "seed": 1, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"temperature": 2.5, "seed": 2, "min_p": 0.4, "logprobs": 0},
        {"temperature": 0.0, "logit_bias": {5: 4.0, 7: 8.0}, "frequency_penalty": 2.0, "logprobs": 2},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.8, "seed": 4, "top_p": 0.9, "repetition_penalty": 1.3, "prompt_logprobs": 2},
        {"temperature": 2.0, "seed": 5, "min_p": 0.6, "top_k": 6, "top_p": 0.8, "min_tokens": 3},
    )
]


def naive(target: Target, prompt: list[int], params: SamplingParams) -> tuple[list[int], list[Tensor]]:
    """Plain decoding by the definitions, one token at a time without a cache: tokens, and raw logprobs of each."""
    tokens, raw = list(prompt), []
    for _ in range(TOKENS):
        logits = target.lm_logits(target.encode(torch.tensor([tokens]), (0,)).hidden[0, -1]).float()
        raw.append(logits.log_softmax(-1))
        for token, bias in (params.logit_bias or {}).items():
            logits[token] += bias
        output = tokens[len(prompt) :]
        for token in set(tokens):
            logit = logits[token]
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
            logits[token] = (
                logit - params.frequency_penalty * output.count(token) - params.presence_penalty * (token in output)
            )
        group = []
        if params.temperature > 0:
            group = [
                SamplingRows(
                    torch.tensor([0]),
                    torch.tensor([params.temperature]),
                    torch.tensor([params.top_k]),
                    torch.tensor([params.top_p]),
                    torch.tensor([params.seed]),
                    torch.tensor([len(tokens)]),
                    params.min_p > 0 or params.top_k > 0 or params.top_p < 1,
                    torch.tensor([params.min_p]),
                )
            ]
        tokens.append(int(choose(logits[None], group)[0]))
    return tokens[len(prompt) :], raw


@pytest.fixture(scope="module")
def expected(target: Target) -> list[tuple[list[int], list[Tensor]]]:
    return [naive(target, prompt, params) for prompt, params in zip(SEQUENCES, PARAMS, strict=True)]


def check_logprobs(request: Request, raw: list[Tensor]) -> None:
    if request.params.logprobs is None:
        assert request.logprobs is None
        return
    assert request.logprobs is not None
    assert len(request.logprobs) == len(request.output_token_ids)
    for token, reported, logprobs in zip(request.output_token_ids, request.logprobs, raw, strict=True):
        best = logprobs.topk(request.params.logprobs)
        assert next(iter(reported)) == token
        assert set(reported) == {token, *best.indices.tolist()}
        for i, entry in reported.items():
            assert entry.logprob == pytest.approx(float(logprobs[i]), abs=1e-4)
            assert entry.rank == int((logprobs >= logprobs[i]).sum())


@pytest.mark.parametrize(
    ("kind", "k", "settings"),
    [
        ("p-eagle", 0, {}),
        ("p-eagle", 0, {"num_scheduler_steps": 3}),
        ("p-eagle", 1, {}),
        ("eagle3", 3, {"max_num_batched_tokens": 9}),
        ("p-eagle", 7, {"block_size": 2, "num_kv_blocks": 70}),
    ],
)
def test_the_same_at_every_depth(
    target: Target, expected: list[tuple[list[int], list[Tensor]]], kind: str, k: int, settings: dict[str, Any]
) -> None:
    """All of them in one batch, with drafts that are right for runs of every length."""
    engine = make_engine(target, tiny_head(target, kind) if k else None, k, **settings)
    if k:
        answers = {str(i): SEQUENCES[i] + expected[i][0] for i in range(len(PARAMS))}
        replay(engine, answers, [7, 2, 0, 4, 7, 1, 3, 5])
    requests = run(engine, SEQUENCES, PARAMS)
    for request, (tokens, raw) in zip(requests, expected, strict=True):
        assert request.output_token_ids == tokens
        check_logprobs(request, raw)
    if k:
        assert engine.stats.spec.num_accepted_tokens > 20
    if "num_kv_blocks" in settings:
        assert engine.stats.num_preemptions > 0
    check_prompt_logprobs(target, requests[6], 2)


def check_prompt_logprobs(target: Target, request: Request, n: int) -> None:
    prompt = request.prompt_token_ids
    logprobs = target.lm_logits(target.encode(torch.tensor([prompt]), (0,)).hidden[0]).float().log_softmax(-1)
    assert request.prompt_logprobs is not None
    assert len(request.prompt_logprobs) == len(prompt)
    assert request.prompt_logprobs[0] is None
    for i, reported in enumerate(request.prompt_logprobs[1:]):
        assert reported is not None
        best = logprobs[i].topk(n).indices.tolist()
        assert set(reported) == {prompt[i + 1], *best}
        for token, entry in reported.items():
            assert entry.logprob == pytest.approx(float(logprobs[i, token]), abs=1e-4)
            assert entry.rank == int((logprobs[i] >= logprobs[i, token]).sum())


def test_the_features_change_what_is_written(target: Target, expected: list[tuple[list[int], list[Tensor]]]) -> None:
    """Otherwise the test above would compare nothing."""
    off = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0}
    for i in (1, 2, 3, 4, 6, 7):
        p = PARAMS[i]
        params = SamplingParams(
            max_tokens=TOKENS, temperature=p.temperature, seed=p.seed, top_k=p.top_k, top_p=p.top_p, **off
        )
        assert naive(target, SEQUENCES[i], params)[0] != expected[i][0]


@pytest.mark.parametrize("batched_tokens", [1, 7, 1024])
def test_prompt_logprobs_in_chunks(target: Target, batched_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle.engine.scheduler.PROMPT_LOGPROB_ROWS", 12)
    engine = make_engine(target, tiny_head(target), 3, max_num_batched_tokens=batched_tokens, max_num_seqs=2)
    asks = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=3)
    wanted = [0]
    pack = runner.pack_logprobs

    def counted(raw: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
        wanted.append(len(raw))
        return pack(raw, token_ids, num_top)

    monkeypatch.setattr("peagle.engine.runner.pack_logprobs", counted)
    prompts = [SEQUENCES[i] for i in (6, 0, 5, 4)]
    requests = run(engine, prompts, [asks, asks, SamplingParams(max_tokens=2), asks])
    check_prompt_logprobs(target, requests[0], 3)
    check_prompt_logprobs(target, requests[3], 3)
    assert requests[1].prompt_logprobs == [None]
    assert requests[2].prompt_logprobs is None
    assert max(wanted) <= 12  # together, so that many such requests need no more memory than one
    assert sum(wanted) == 39 + 16


def test_logprobs_end_with_the_tokens(target: Target, plain: list[list[int]]) -> None:
    """A stop token inside an accepted run: nothing behind it is reported, in steps or at the end."""
    prompt, answer = SEQUENCES[3], plain[3]
    engine = make_engine(target, tiny_head(target), 7)
    replay(engine, {"0": prompt + answer})
    stop = answer[4]
    end = answer.index(stop) + 1
    params = SamplingParams(max_tokens=30, temperature=0.0, stop_token_ids=[stop], logprobs=1)
    request = engine.add_request("0", prompt, params)
    outputs = drain(engine)
    assert request.output_token_ids == answer[:end]
    assert request.logprobs is not None
    assert [next(iter(entry)) for entry in request.logprobs] == answer[:end]
    assert [entry for output in outputs for entry in output.new_logprobs or []] == request.logprobs


def test_penalties_by_definition() -> None:
    """Tokens 1, 2 are the prompt, 2, 3, 3 the output; what stands behind is not looked at."""
    buffer = torch.tensor([9, 1, 2, 2, 3, 3, 4, 4])
    logits = torch.tensor([[1.0, 1.0, -1.0, 2.0, 2.0, 0.5, 0.5, 0.5, 0.5, 0.5]]).repeat(2, 1)
    one = lambda value: torch.tensor([value])  # noqa: E731
    penalties = Penalties(one(1), one(1), one(5), one(2), 6, one(2.0), one(0.25), one(0.5))
    penalise(logits, penalties, buffer)
    assert logits[0].tolist() == pytest.approx([1.0, 1.0, -1.0, 2.0, 2.0, 0.5, 0.5, 0.5, 0.5, 0.5])
    assert logits[1].tolist() == pytest.approx([1.0, 0.5, -2.75, -0.25, 2.0, 0.5, 0.5, 0.5, 0.5, 0.5])


@pytest.mark.parametrize(("min_p", "top_k", "top_p"), [(0.1, 0, 1.0), (0.02, 0, 0.7), (0.1, 3, 1.0), (1e-4, 0, 1.0)])
def test_min_p_keeps_what_it_should(min_p: float, top_k: int, top_p: float) -> None:
    """Against the definition over the whole vocabulary; the last case needs more candidates than are tried first."""
    vocab, n = 5000, 3000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(0)) * 2.5
    probs = logits.double().softmax(-1)
    probs[probs < min_p * probs.max()] = 0
    if top_k:
        probs[probs < probs.topk(top_k).values[-1]] = 0
    probs /= probs.sum()
    order = probs.sort(descending=True)
    within = order.values.cumsum(0) - order.values < top_p
    kept = set(order.indices[within & (order.values > 0)].tolist())
    rows = SamplingRows(
        torch.arange(n),
        torch.ones(n),
        torch.full((n,), top_k),
        torch.full((n,), top_p),
        torch.arange(n),
        torch.zeros(n, dtype=torch.int64),
        True,
        torch.full((n,), min_p),
    )
    chosen = choose(logits.expand(n, -1), [rows])
    assert set(chosen.tolist()) <= kept
    if len(kept) < 100:
        assert set(chosen.tolist()) == kept
    share = float((chosen == logits.argmax()).double().mean())
    assert share == pytest.approx(float(probs.max() / order.values[within].sum()), abs=0.03)


def test_what_is_off_costs_nothing(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(*_args: Any) -> None:
        raise AssertionError

    for name in ("adjust", "pack_logprobs", "unpack_logprobs"):
        monkeypatch.setattr(f"peagle.engine.runner.{name}", unwanted)
    run(
        make_engine(target, tiny_head(target), 3), SEQUENCES[:3], SamplingParams(max_tokens=4, temperature=1.0, top_k=5)
    )


@pytest.mark.parametrize("k", [0, 3])
def test_several_completions(target: Target, k: int) -> None:
    llm = LLM(target, max_model_len=128, max_num_seqs=4)
    if k:
        llm.engine = make_engine(target, tiny_head(target), k)
    prompts = [{"prompt_token_ids": SEQUENCES[i]} for i in (1, 3)]
    params = SamplingParams(max_tokens=6, seed=10, n=3, logprobs=1, prompt_logprobs=0)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.request_id for output in outputs] == ["0", "1"]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert [c.index for c in output.outputs] == [0, 1, 2]
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(prompt["prompt_token_ids"])
        for i, completion in enumerate(output.outputs):
            (alone,) = llm.generate(prompt, SamplingParams(max_tokens=6, seed=10 + i), use_tqdm=False)
            assert completion.token_ids == alone.outputs[0].token_ids
            assert completion.logprobs is not None
            assert completion.cumulative_logprob == pytest.approx(
                sum(at[t].logprob for t, at in zip(completion.token_ids, completion.logprobs, strict=True))
            )
            token = completion.token_ids[0]
            tokenizer = target.tokenizer
            assert tokenizer is not None
            assert completion.logprobs[0][token].decoded_token == tokenizer.decode([token])
        assert output.metrics.num_drafts > 0 or not k
    free = llm.generate(prompts[:1], SamplingParams(max_tokens=6, n=3), use_tqdm=False)
    assert len({tuple(c.token_ids) for c in free[0].outputs}) == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -3),
        ("frequency_penalty", float("nan")),
        ("logprobs", -2),
        ("prompt_logprobs", 1.5),
        ("logit_bias", [1]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {1: float("inf")}),
    ],
)
def test_bad_parameters(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"^{field}: got .*expected"):
        SamplingParams(**{field: value})


def test_refused_by_the_engine(target: Target) -> None:
    engine = make_engine(target)
    for params, message in (
        ({"n": 2}, "n: got 2"),
        ({"logprobs": 21}, "logprobs: got 21, expected at most 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs: got -1, expected at most 20"),
        ({"logit_bias": {999: 1.0}}, "logit_bias: got 999"),
    ):
        with pytest.raises(InputError, match=message):
            engine.add_request("0", [1], SamplingParams(**params))
    assert not engine.has_unfinished
    (request,) = run(
        make_engine(target, max_logprobs=-1), [[1, 2]], SamplingParams(max_tokens=1, logprobs=-1, temperature=0.0)
    )
    assert request.logprobs is not None
    assert len(request.logprobs[0]) == target.vocab_size
    assert SamplingParams(logit_bias={"3": 500}).logit_bias == {3: 100.0}  # type: ignore[dict-item]
    assert max(request.output_token_ids) < ASCII
