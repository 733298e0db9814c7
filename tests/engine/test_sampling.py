"""Sampled output: the target's own distribution, whatever is drafted, and a request's own noise."""

from __future__ import annotations

from itertools import cycle, product

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from peagle.engine import SamplingParams, verification
from peagle.engine.argmax import argmax_rows
from peagle.engine.sampler import SamplingRows, choose, uniform
from peagle.target import Target
from tests.engine.helpers import SEQUENCES, make_engine, run, tiny_head

SAMPLES = 20_000
VOCAB = 8
PROMPT = [3, 1, 4]
TEMPERATURE = 1.5
# the same two tokens always: accepted often, and never for a reason that has to do with the sample
DRAFTS = torch.tensor([0, 2])


@pytest.fixture(scope="module")
def small() -> Target:
    """One layer and eight tokens: every continuation can be enumerated."""
    torch.manual_seed(5)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCAB,
        max_position_embeddings=64,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Target(LlamaForCausalLM(config), None, "small")


def nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Top-p by its definition, one row at a time."""
    out = torch.zeros_like(probs)
    for row, result in zip(probs, out, strict=True):
        mass = 0.0
        for i in row.argsort(descending=True).tolist():
            if mass >= top_p:
                break
            mass += float(row[i])
            result[i] = row[i]
    return out / out.sum(-1, keepdim=True)


def exact(target: Target, top_p: float) -> list[Tensor]:
    """The distribution of the first, second and third token behind PROMPT, by enumeration."""

    def following(prefixes: list[tuple[int, ...]]) -> Tensor:
        ids = torch.tensor([[*PROMPT, *prefix] for prefix in prefixes])
        logits = target.lm_logits(target.encode(ids, (0,)).hidden[:, -1])
        return nucleus((logits.double() / TEMPERATURE).softmax(-1), top_p)

    first = following([()])[0]
    second = following(list(product(range(VOCAB), repeat=1)))
    third = following(list(product(range(VOCAB), repeat=2))).view(VOCAB, VOCAB, VOCAB)
    pairs = first[:, None] * second
    return [first, pairs.sum(0), (pairs[..., None] * third).sum((0, 1))]


def p_values(
    target: Target, top_p: float, monkeypatch: pytest.MonkeyPatch, changing_k: tuple[int, ...] = ()
) -> list[float]:
    """Chi-square p-values of the first, second and third token of SAMPLES samples. changing_k: drafts, step by step."""
    config = {"max_num_seqs": 500, "max_model_len": 8, "seed": 1, "dynamic_speculation": bool(changing_k)}
    engine = make_engine(target, tiny_head(target, layers=1), 2, **config)
    assert engine.runner.draft_pass is not None
    if changing_k:
        assert engine.draft_planner is not None
        numbers = cycle(changing_k)
        monkeypatch.setattr(engine.draft_planner, "_choose", lambda _: next(numbers))
        monkeypatch.setattr(engine.draft_planner, "_joins", lambda *_: True)
    # what a head proposes does not matter here, so none is run
    monkeypatch.setattr(
        engine.runner.draft_pass, "propose", lambda _batch, v: (DRAFTS.expand(len(v.num_drafts), -1), v.num_drafts)
    )
    params = SamplingParams(max_tokens=3, temperature=TEMPERATURE, top_p=top_p)
    tokens = np.array([r.output_token_ids for r in run(engine, [PROMPT] * SAMPLES, params)])
    values = []
    for i, probs in enumerate(exact(target, top_p)):
        counts = np.bincount(tokens[:, i], minlength=VOCAB)
        possible = probs.numpy() > 0
        assert counts[~possible].sum() == 0
        expected = probs.numpy()[possible] * SAMPLES
        values.append(float(chisquare(counts[possible], expected * counts.sum() / expected.sum()).pvalue))
    return values


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_distribution(small: Target, top_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert min(p_values(small, top_p, monkeypatch)) > 1e-3


def test_distribution_while_the_number_of_drafts_changes(small: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    assert min(p_values(small, 1.0, monkeypatch, changing_k=(2, 0, 1, 2, 2))) > 1e-3


def test_a_broken_acceptance_rule_is_noticed(small: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that also accepts the neighbour of the token that the target chose."""
    monkeypatch.setattr(verification, "accepts", lambda choices, drafts: (choices - drafts).abs() <= 1)
    values = p_values(small, 1.0, monkeypatch)
    assert values[0] > 1e-3  # chosen in the prefill, before there are drafts
    assert values[1] < 1e-6
    assert values[2] < 1e-4


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_seeded_tokens_depend_on_nothing_else(target: Target, kind: str) -> None:
    """Alone or in a batch, plain or at any K, in chunks, preempted or not."""
    params = [
        SamplingParams(max_tokens=24, temperature=t, top_k=top_k, top_p=top_p, seed=i, ignore_eos=True)
        for i, (t, top_k, top_p) in enumerate(
            [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.9), (0.0, 0, 1.0), (2.0, 0, 1.0), (1.0, -1, 0.5), (1, 20, 0.7)]
        )
    ]
    prompts = SEQUENCES[: len(params)]
    alone = [run(make_engine(target), [p], s)[0].output_token_ids for p, s in zip(prompts, params, strict=True)]
    assert len({tuple(answer) for answer in alone}) == len(alone)
    for k, settings in (
        (0, {}),
        (1, {}),
        (4, {"max_num_batched_tokens": 9}),
        (7, {"block_size": 2, "num_kv_blocks": 70}),
    ):
        engine = make_engine(target, tiny_head(target, kind) if k else None, k, **settings)
        batch = [r.output_token_ids for r in run(engine, prompts, params)]
        assert batch == alone
        if "num_kv_blocks" in settings:
            assert engine.stats.num_preemptions > 0


def test_requests_without_a_seed_differ_and_the_engines_seed_repeats_them(target: Target) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0)
    outputs = [
        [r.output_token_ids for r in run(make_engine(target, seed=seed), [SEQUENCES[1]] * 4, params)]
        for seed in (0, 0, 1)
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0] != outputs[2]
    assert len({tuple(o) for o in outputs[0]}) == 4


def rows(temperature: float, top_k: int, top_p: float, seeds: Tensor) -> SamplingRows:
    n = len(seeds)
    return SamplingRows(
        torch.arange(n),
        torch.full((n,), temperature),
        torch.full((n,), top_k),
        torch.full((n,), top_p),
        seeds,
        torch.zeros(n, dtype=torch.int64),
        top_k > 0 or top_p < 1,
    )


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.7), (40, 0.7), (0, 0.999), (200, 1.0)])
def test_sampler_keeps_what_it_should(top_k: int, top_p: float) -> None:
    """Against a dense definition, in a vocabulary where the candidates are tried in steps."""
    vocab, n = 5000, 4000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(0)) * 2.5
    scaled = logits.double() / 0.9
    if top_k:
        scaled[scaled < scaled.topk(top_k).values[-1]] = -torch.inf
    expected = nucleus(scaled.softmax(-1)[None], top_p)[0] if top_p < 1 else scaled.softmax(-1)
    chosen = choose(logits.expand(n, -1), [rows(0.9, top_k, top_p, torch.arange(n))])
    counts = torch.bincount(chosen, minlength=vocab)
    assert counts[expected == 0].sum() == 0
    common = expected > 5 / n  # tokens rare enough to be seen seldom are counted together
    observed = torch.cat((counts[common], counts[~common].sum()[None])).numpy()
    wanted = torch.cat((expected[common], expected[~common].sum()[None])).numpy() * n
    seen = wanted > 0
    assert chisquare(observed[seen], wanted[seen] * n / wanted[seen].sum()).pvalue > 1e-3


def test_top_k_keeps_ties_as_vllm_does() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0]).expand(500, -1)
    chosen = choose(logits, [rows(1.0, 2, 1.0, torch.arange(500))])
    assert set(chosen.tolist()) == {1, 2, 3, 4}


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(1)) * torch.tensor(
        [[9.0], [1], [4], [1], [2], [6]]
    )
    together = choose(logits, [rows(1.0, 0, 0.95, torch.arange(6))])
    for i in range(6):
        group = rows(1.0, 0, 0.95, torch.tensor([i]))
        assert choose(logits[i : i + 1], [group]).item() == together[i]


def test_uniform_noise() -> None:
    seeds, positions = torch.meshgrid(torch.arange(300), torch.arange(300), indexing="ij")
    noise = uniform(seeds.flatten(), positions.flatten())
    assert noise.min() >= 0
    assert noise.max() < 1
    assert len(noise.unique()) == len(noise)
    counts = torch.histc(noise.float(), 100, 0, 1).numpy()
    assert chisquare(counts).pvalue > 1e-3
    for axis in (0, 1):  # neither neighbouring seeds nor neighbouring positions go together
        grid = noise.view(300, 300)
        pairs = np.corrcoef(grid.narrow(axis, 0, 299).flatten(), grid.narrow(axis, 1, 299).flatten())
        assert abs(pairs[0, 1]) < 0.015


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (40, 1.0), (0, 0.95)])
def test_logits_that_differ_by_rounding_choose_the_same(top_k: int, top_p: float) -> None:
    """As they do with other drafts or others in the batch. (At the border of a filter a token may come or go.)"""
    g = torch.Generator().manual_seed(2)
    logits = torch.randn(3000, 5000, generator=g) * 3
    group = rows(1.5, top_k, top_p, torch.arange(3000))
    rounded = logits + 1e-4 * torch.randn(logits.shape, generator=g)
    assert int((choose(logits, [group]) != choose(rounded, [group])).sum()) <= 3


@pytest.mark.parametrize("vocab", [64, 640, 100])
def test_argmax_in_chunks(vocab: int) -> None:
    """The same as PyTorch's, in ties too."""
    logits = torch.randint(0, 6, (50, vocab), generator=torch.Generator().manual_seed(0)).float()
    logits[7] = -torch.inf
    first = [row.index(max(row)) for row in logits.tolist()]
    assert argmax_rows(logits).tolist() == first
    assert argmax_rows(logits[:0]).shape == (0,)
