"""Small engines, heads with chosen acceptance, and prompts for the engine's tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from peagle.config.engine import EngineConfig
from peagle.drafter import Drafter, DrafterConfig
from peagle.engine import Engine, SamplingParams, StepOutput
from peagle.engine.parity import first_divergence, logit_gap
from peagle.engine.request import Request
from peagle.target import Target

ASCII = 94  # token ids below are printable characters
_generator = torch.Generator().manual_seed(7)
# prompts of lengths around block and chunk boundaries
SEQUENCES = [torch.randint(0, ASCII, (n,), generator=_generator).tolist() for n in (1, 2, 15, 16, 17, 33, 40, 7)]


def greedy(max_tokens: int, **over: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **({"ignore_eos": True} | over))


def tiny_head(target: Target, kind: str = "p-eagle", layers: int = 2, seed: int = 0, **over: Any) -> Drafter:
    """A random head of the target, bound to it."""
    torch.manual_seed(seed)
    h = target.hidden_size
    settings: dict[str, Any] = {
        "kind": kind,
        "hidden_size": h,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": target.vocab_size,
        "aux_hidden_state_layer_ids": tuple(i for i in (0, 1, 3, 5) if i < target.num_layers),
        "mask_token_id": target.vocab_size - 1 if kind == "p-eagle" else None,
        "k_train": 8,
    }
    drafter = Drafter(DrafterConfig(**(settings | over)))
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0)
    drafter.bind(target.embed_weight, target.lm_head_weight)
    return drafter.eval().requires_grad_(False)


def make_engine(
    target: Target,
    drafter: Drafter | None = None,
    k: int = 0,
    synthetic_rates: tuple[float, ...] | None = None,
    draft_window: int | Literal["auto"] | None = "auto",
    **config: Any,
) -> Engine:
    settings: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 128} | config
    return Engine(target, drafter, k, EngineConfig(**settings), synthetic_rates, draft_window=draft_window)


def drain(engine: Engine) -> list[StepOutput]:
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    return outputs


def run(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[Request]:
    """All prompts at once, to the end. The blocks must all be back afterwards."""
    several = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    requests = [engine.add_request(str(i), p, s) for i, (p, s) in enumerate(zip(prompts, several, strict=True))]
    drain(engine)
    assert engine.blocks.num_free == engine.blocks.num_blocks
    assert not engine.requests
    return requests


def replay(
    engine: Engine,
    answers: dict[str, list[int]],
    wrong_after: Sequence[int] | Callable[[int], int] | None = None,
) -> None:
    """Make the engine draft what the target will say: answers[request_id] is prompt and continuation.

    In the n-th draft of the engine the token after wrong_after[n % len] right ones is wrong, or after wrong_after(the
    position before the draft); None: all are right. The drafter still runs and fills its cache, only what it proposes
    is replaced.
    """
    runner = engine.runner
    store = runner.lanes.store_drafts
    count = 0

    def replaced(drafts: Tensor, num_drafts: Tensor, lane_offset: Tensor, next_position: Tensor) -> None:
        nonlocal count
        by_lane = {request.lane: request for request in engine.scheduler.running}
        for r in range(len(drafts)):
            if callable(wrong_after) and num_drafts[r] == 0:  # padding of a fixed shape, perhaps
                continue
            request = by_lane[int(lane_offset[r]) // runner.lanes.width]
            known = answers[request.request_id]
            first = int(next_position[r]) + 1
            right = known[first : first + drafts.shape[1]]
            right += [0] * (drafts.shape[1] - len(right))
            if wrong_after is not None:
                if callable(wrong_after):
                    wrong = wrong_after(first - 1)
                else:
                    wrong = wrong_after[count % len(wrong_after)]
                    count += 1
                if wrong < len(right):
                    right[wrong] = (right[wrong] + 1) % ASCII
            drafts[r] = torch.tensor(right)
        store(drafts, num_drafts, lane_offset, next_position)

    runner.lanes.store_drafts = replaced  # type: ignore[method-assign]


def assert_same(target: Target, prompt: list[int], reference: list[int], ids: list[int]) -> None:
    """Token-identical, or a message with the first difference and the logit gap there."""
    found = first_divergence(reference, ids)
    assert found is None, f"{found}, logit gap {logit_gap(target, prompt, reference, found)}"
