"""Fused experts take the place of the modules that compute the same, and of no others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from peagle.engine.loading import prepare_for_inference
from peagle.kernels import experts as experts_module
from peagle.kernels.mxfp4 import pack_mxfp4, unpack_mxfp4
from peagle.target import Target, load_target
from peagle.target.fused_experts import FusedExperts, fuse_experts
from tests.engine.helpers import ASCII, SEQUENCES, assert_same, greedy, make_engine, run, tiny_head
from tests.kernels.test_mxfp4 import random_mxfp4

CUDA = torch.cuda.is_available()
MIXTURES = {"gpt_oss": 7, "qwen3_moe": 6}  # layers that have one


def mixtures(target: Target) -> list[Any]:
    return [m for m in target.model.modules() if hasattr(m, "is_transposed") or isinstance(m, FusedExperts)]


@torch.no_grad()
def make_mxfp4(target: Target) -> None:
    """Weights as a dequantised checkpoint has them; down's depth is no multiple of 32 and stays."""
    for module in mixtures(target):
        weight = module.gate_up_proj.mT if module.is_transposed else module.gate_up_proj
        weight.copy_(unpack_mxfp4(*random_mxfp4(*weight.shape, low=122, high=124), weight.dtype))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Triton kernels on the CPU, interpreted."""
    pytest.importorskip("triton")
    if not CUDA:
        from peagle.kernels.experts_triton import experts_triton

        monkeypatch.setattr("peagle.target.fused_experts.experts", experts_triton)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", MIXTURES)
def test_a_target_computes_the_same(target_folder: Callable[[str], Path], name: str, packed: bool) -> None:
    target = load_target(str(target_folder(name)), device="cpu")
    if packed:
        make_mxfp4(target)
    ids = torch.randint(0, 256, (1, 24), generator=torch.Generator().manual_seed(0))
    before = target.encode(ids, (1, 3, 6))
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert fuse_experts(target.model) == MIXTURES[name]
    assert torch.equal(torch.get_rng_state(), state)
    assert fuse_experts(target.model) == 0
    assert all((m.gate_up_scales is not None) == packed and m.down_scales is None for m in mixtures(target))
    after = target.encode(ids, (1, 3, 6))
    torch.testing.assert_close(after.aux, before.aux, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(after.hidden, before.hidden, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_whatever_transformers_runs_them_with(target_folder: Callable[[str], Path], implementation: str) -> None:
    target = load_target(str(target_folder("gpt_oss")), device="cpu")
    target.model.set_experts_implementation(implementation)
    assert fuse_experts(target.model) == MIXTURES["gpt_oss"]


def test_the_former_weights_go(target_folder: Callable[[str], Path]) -> None:
    import gc
    import weakref

    target = load_target(str(target_folder("gpt_oss")), device="cpu")
    former = [weakref.ref(m) for m in mixtures(target)]
    size = sum(p.numel() for p in target.model.parameters())
    fuse_experts(target.model)
    gc.collect()
    assert not any(reference() for reference in former)
    assert sum(p.numel() for p in target.model.parameters()) == size


class Other(nn.Module):
    """Laid out as gpt-oss's, computing something else."""

    def __init__(self, like: Any) -> None:
        super().__init__()
        self.__dict__.update(copy.deepcopy(like).__dict__)

    def forward(self, hidden: Tensor, indices: Tensor, routing: Tensor) -> Tensor:
        return 1.1 * hidden


@pytest.mark.parametrize("change", ["activation", "limit", "layout", "hook", "class"])
def test_others_are_left_alone(target_folder: Callable[[str], Path], change: str) -> None:
    target = load_target(str(target_folder("gpt_oss")), device="cpu")
    first = mixtures(target)[0]
    parent = next(m for m in target.model.modules() if getattr(m, "experts", None) is first)
    if change == "activation":
        first._apply_gate = lambda gate_up: torch.relu(gate_up[..., ::2]) * gate_up[..., 1::2]
    elif change == "limit":
        original = first._apply_gate
        first._apply_gate = lambda gate_up: original(gate_up.clamp(-5, 5))
    elif change == "layout":
        first.extra = nn.Parameter(torch.zeros(3))
    elif change == "hook":
        first.register_forward_hook(lambda *_: None)
    else:
        parent.experts = Other(first)
    kept = parent.experts
    assert fuse_experts(target.model) == MIXTURES["gpt_oss"] - 1
    assert parent.experts is kept


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_models_without_them(target_folder: Callable[[str], Path], name: str) -> None:
    assert fuse_experts(load_target(str(target_folder(name)), device="cpu").model) == 0


def test_a_cpu_keeps_transformers_modules(target_folder: Callable[[str], Path]) -> None:
    target = load_target(str(target_folder("gpt_oss")), device="cpu")
    prepare_for_inference(target)
    assert not any(isinstance(m, FusedExperts) for m in mixtures(target))


def answers(target: Target, count: int, length: int, drafts: int = 0) -> list[list[int]]:
    head = None
    if drafts:
        head = tiny_head(target, "p-eagle").to(target.device)
        head.bind(target.embed_weight, target.lm_head_weight)
    requests = run(make_engine(target, head, drafts), SEQUENCES[:count], greedy(length))
    return [r.output_token_ids for r in requests]


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", MIXTURES)
def test_the_engine_says_the_same(target_folder: Callable[[str], Path], name: str, packed: bool) -> None:
    """With the kernels, on a GPU within CUDA graphs too."""
    target = load_target(str(target_folder(name)), dtype="float32", device="cuda" if CUDA else "cpu")
    with torch.no_grad():
        target.lm_head_weight[ASCII:] = 0
    if packed:
        make_mxfp4(target)
    count, length = (8, 40) if CUDA else (2, 3)
    expected = answers(target, count, length)
    assert fuse_experts(target.model) == MIXTURES[name]
    for drafts in (0, 3):
        for prompt, one, other in zip(SEQUENCES, expected, answers(target, count, length, drafts), strict=False):
            assert_same(target, prompt, one, other)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("name", MIXTURES)
def test_steps_are_recorded(target_folder: Callable[[str], Path], name: str) -> None:
    """In bfloat16, as `prepare_for_inference` leaves a target."""
    target = load_target(str(target_folder(name)), dtype="bfloat16", device="cuda")
    make_mxfp4(target)
    prepare_for_inference(target)
    assert sum(isinstance(m, FusedExperts) for m in mixtures(target)) == MIXTURES[name]
    engine = make_engine(target)
    engine.capture()
    run(engine, SEQUENCES, greedy(20))
    assert engine.runner.decode is not None
    assert engine.runner.decode.graphs.possible


def test_dispatch_on_a_cpu() -> None:
    """Is the specification, without Triton."""
    weights = experts_module.ExpertWeights(
        experts_module.Product(torch.ones(2, 8, 4), None, None), experts_module.Product(torch.ones(2, 4, 4), None, None)
    )
    arguments = (torch.ones(3, 4), torch.tensor([[0], [1], [1]]), torch.ones(3, 1))
    got = experts_module.experts(*arguments, weights)
    torch.testing.assert_close(got, experts_module.experts_torch(*arguments, weights))
    assert pack_mxfp4(torch.ones(2, 8, 4)) is None
