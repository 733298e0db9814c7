"""The offline interface, from folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import peagle
from peagle.drafter import save_drafter
from peagle.engine import LLM, SamplingParams, SpecMetrics
from peagle.errors import InputError
from peagle.target import Target
from tests.engine.helpers import tiny_head


@pytest.fixture(scope="module")
def heads(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A random head of each kind, as folders."""
    folder = tmp_path_factory.mktemp("heads")
    return {kind: str(save_drafter(tiny_head(target, kind), folder / kind)) for kind in ("p-eagle", "eagle3")}


@pytest.fixture(scope="module")
def folder(target_folder: Callable[[str], Path]) -> str:
    return str(target_folder("llama"))


PROMPTS = ["Once upon", "x", "A third one, longer than the others."]


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_generate(folder: str, heads: dict[str, str], kind: str) -> None:
    params = SamplingParams(max_tokens=12, temperature=0)
    plain = LLM(folder, device="cpu", max_model_len=128).generate(PROMPTS, params, use_tqdm=False)
    llm = LLM(
        folder,
        {"model": heads[kind], "num_speculative_tokens": 4, "parallel_drafting": kind == "p-eagle"},
        device="cpu",
        max_num_seqs=2,
        max_model_len=128,
    )
    outputs = llm.generate(PROMPTS, params)
    tokenizer = llm.get_tokenizer()
    for prompt, reference, output in zip(PROMPTS, plain, outputs, strict=True):
        (ours,), (expected,) = output.outputs, reference.outputs
        assert ours == expected
        assert output.prompt == prompt
        assert output.prompt_token_ids == tokenizer(prompt).input_ids
        assert ours.text == tokenizer.decode(ours.token_ids, skip_special_tokens=True)
        assert output.metrics.num_drafts > 0
    assert llm.stats.spec.num_drafts == sum(output.metrics.num_drafts for output in outputs)
    ids = [{"prompt_token_ids": output.prompt_token_ids} for output in outputs]
    again = llm.generate(ids, [params] * 3, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in outputs]
    assert again[0].prompt is None


def test_chat(folder: str) -> None:
    llm = LLM(folder, device="cpu", max_model_len=128)
    params = SamplingParams(max_tokens=3, temperature=0)
    messages = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(messages, params, use_tqdm=False)
    assert one.prompt == "<user>hi<|end|><assistant>"
    assert one.prompt_token_ids[8] == 257  # a special token, not its characters
    assert len(llm.chat([messages, messages], params, use_tqdm=False)) == 2
    parts = [{"type": "text", "text": "hi"}, {"type": "text", "text": "there"}]
    (lines,) = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
    assert lines.prompt == "<user>hi\nthere<|end|><assistant>"  # what vLLM makes of it


def test_what_is_refused(folder: str, heads: dict[str, str]) -> None:
    for kind, flag in (("p-eagle", False), ("eagle3", True)):
        with pytest.raises(InputError, match=f"kind: is {kind}, expected .* parallel_drafting"):
            LLM(folder, {"model": heads[kind], "num_speculative_tokens": 4, "parallel_drafting": flag}, device="cpu")
    with pytest.raises(InputError, match="max_num_sequences"):
        LLM(folder, device="cpu", max_num_sequences=4)
    llm = LLM(folder, device="cpu", max_model_len=64)
    with pytest.raises(InputError, match="prompt: got 100 tokens, expected at most 63"):
        llm.generate(["fine", "x" * 100], use_tqdm=False)
    assert not llm.engine.has_unfinished  # the first is not left to run in the next call
    with pytest.raises(InputError, match="prompt: got"):
        llm.generate([{"text": "x"}], use_tqdm=False)
    with pytest.raises(InputError, match="sampling_params: got 1, expected one or as many as prompts"):
        llm.generate(["a", "b"], [SamplingParams()], use_tqdm=False)
    with pytest.raises(InputError, match="sampling_params: got 'temperature', expected SamplingParams"):
        llm.generate("x", {"temperature": 1}, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="sampling_params: got 5, expected SamplingParams"):
        llm.generate("x", 5, use_tqdm=False)  # type: ignore[arg-type]
    for ids in ([1.5], ["1"]):
        with pytest.raises(InputError, match="prompt: got a token id that is no integer"):
            llm.generate({"prompt_token_ids": ids}, use_tqdm=False)
    with pytest.raises(InputError, match="prompt: got"):
        llm.generate({"prompt_token_ids": None}, use_tqdm=False)
    with pytest.raises(InputError, match="prompts: got None"):
        llm.generate(None, use_tqdm=False)  # type: ignore[arg-type]
    image = {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}
    for messages in ([], 5, [5], [None], [[5]], "hello", ["hello"], [{"content": "no role"}], [image]):
        with pytest.raises(InputError, match=r"^messages: got"):
            llm.chat(messages)  # type: ignore[arg-type]
    llm.get_tokenizer().chat_template = "{{ raise_exception('robots only') }}"
    with pytest.raises(InputError, match=r"the chat template refuses them .*robots only"):
        llm.chat([{"role": "user", "content": "x"}])


def test_names_are_where_vllm_has_them() -> None:
    assert (peagle.LLM, peagle.SamplingParams) == (LLM, SamplingParams)
    assert peagle.__version__[0].isdigit()
    with pytest.raises(AttributeError, match=r"peagle.*Engines"):
        peagle.Engines  # noqa: B018


def test_an_interrupted_call_leaves_nothing(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(folder, device="cpu", max_model_len=64)
    step = llm.engine.step
    steps = iter([step, step, None])

    def interrupted() -> object:
        if (now := next(steps)) is None:
            raise KeyboardInterrupt
        return now()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, SamplingParams(max_tokens=9), use_tqdm=False)
    assert llm.engine.blocks.num_free == llm.engine.blocks.num_blocks
    assert not llm.engine.has_unfinished


def test_metrics() -> None:
    metrics, total = SpecMetrics(), SpecMetrics()
    assert metrics.acceptance_length == 1.0
    for drafted, accepted in ((3, 3), (3, 1), (3, 0), (1, 1), (0, 0)):
        metrics.add(drafted, accepted)
    assert (metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_tokens) == (4, 10, 5)
    assert metrics.acceptance_length == 1 + 5 / 4
    assert metrics.reached_per_pos == [4, 2, 1]
    assert metrics.conditional_rates == [3 / 4, 1 / 2, 1.0]
    assert metrics.joint_rates == [3 / 4, 3 / 8, 3 / 8]
    total.merge(metrics)
    total.merge(metrics)
    assert (total.num_drafts, total.accepted_per_pos, total.reached_per_pos) == (8, [6, 2, 2], [8, 4, 2])


def test_rates_stay_within_one_where_short_steps_fail() -> None:
    metrics = SpecMetrics()
    for drafted, accepted in ((1, 0), (1, 0), (2, 2), (3, 3)):
        metrics.add(drafted, accepted)
    assert metrics.conditional_rates == [1 / 2, 1.0, 1.0]
    assert metrics.joint_rates == [1 / 2, 1 / 2, 1 / 2]


def test_counts_without_the_drafts_that_reached_a_position() -> None:
    """A server's counters, and results of earlier versions: every draft counts as one that had all positions."""
    counted = SpecMetrics(4, 12, 5, [3, 1, 1], [4, 4, 4])
    assert counted.joint_rates == pytest.approx([3 / 4, 1 / 4, 1 / 4])
    assert counted.conditional_rates == pytest.approx([3 / 4, 1 / 3, 1.0])
    total = SpecMetrics()
    total.merge(counted)
    total.add(3, 3)
    assert (total.accepted_per_pos, total.reached_per_pos) == ([4, 2, 2], [5, 4, 2])


def test_bfloat16_runs(folder: str, heads: dict[str, str]) -> None:
    spec = {"model": heads["p-eagle"], "num_speculative_tokens": 3}
    llm = LLM(folder, spec, dtype="bfloat16", device="cpu", max_model_len=64)
    assert llm.engine.drafter is not None
    assert llm.engine.drafter.fc.weight.dtype == torch.bfloat16
    (output,) = llm.generate("x", SamplingParams(max_tokens=5), use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= 5


def test_an_unfit_head_is_refused_before_weights_are_read(
    folder: str, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = save_drafter(tiny_head(target, aux_hidden_state_layer_ids=(0, 1, 99)), tmp_path / "head")
    monkeypatch.setattr("peagle.engine.loading.load_target", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(InputError, match="99"):
        LLM(folder, {"model": str(head), "num_speculative_tokens": 2, "parallel_drafting": True})
    with pytest.raises(InputError, match="kind"):
        LLM(folder, {"model": str(head), "num_speculative_tokens": 2, "parallel_drafting": False})
