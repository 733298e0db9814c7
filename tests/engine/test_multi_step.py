"""Several decoding steps a plan give the tokens of single steps, wherever a request ends among them."""

import pytest
import torch

from peagle.config.engine import EngineConfig
from peagle.engine.engine import Engine
from peagle.engine.sampling_params import SamplingParams
from peagle.errors import InputError


def run(target, steps, requests, **settings):
    config = EngineConfig(max_model_len=64, num_scheduler_steps=steps, **settings)
    engine = Engine(target, config=config)
    made = [engine.add_request(str(i), prompt, params) for i, (prompt, params) in enumerate(requests)]
    while engine.has_unfinished:
        for output in engine.step():
            assert not any(output.accepted_mask)
    assert engine.blocks.num_free == engine.blocks.num_blocks
    return [(r.output_token_ids, r.finish_reason) for r in made], engine


@pytest.fixture
def requests():
    g = torch.Generator().manual_seed(3)
    made = []
    for i in range(9):
        prompt = torch.randint(0, 100, (1 + 5 * i,), generator=g).tolist()
        temperature = 0.9 if i % 3 == 0 else 0.0
        made.append(
            (prompt, SamplingParams(max_tokens=5 + 4 * i, temperature=temperature, seed=i, ignore_eos=i % 2 == 0))
        )
    return made


@pytest.mark.parametrize("steps", [2, 7, 16])
@pytest.mark.parametrize("settings", [{}, {"block_size": 1, "max_num_seqs": 3}, {"num_kv_blocks": 9}])
def test_same_tokens_as_single_steps(target, requests, steps, settings):
    expected, _ = run(target, 1, requests, **settings)
    got, engine = run(target, steps, requests, **settings)
    assert got == expected
    assert engine.runner.decode is not None


def test_stop_token_inside_a_burst(target):
    prompt = [5, 6, 7]
    (plain, _), *_ = run(target, 1, [(prompt, SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))])[0]
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, stop_token_ids=[plain[4]])
    (got, reason), *_ = run(target, 16, [(prompt, params)])[0]
    assert got == plain[: plain.index(plain[4]) + 1]
    assert reason == "stop"


def test_requests_with_top_p_or_min_tokens_take_single_steps(target):
    requests = [
        ([1, 2, 3], SamplingParams(max_tokens=9, temperature=0.8, top_p=0.5, seed=1)),
        ([4, 5], SamplingParams(max_tokens=9, temperature=0, min_tokens=6)),
    ]
    assert run(target, 8, requests)[0] == run(target, 1, requests)[0]


def test_not_with_a_drafter():
    with pytest.raises(InputError, match="num_scheduler_steps: got 0"):
        EngineConfig(num_scheduler_steps=0)
