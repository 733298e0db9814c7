"""What is refused before anything runs, and what is only warned of: settings of an engine, requests."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from operator import index
from typing import Literal

import torch

from peagle.config.checks import check_window
from peagle.config.engine import EngineConfig
from peagle.draft_table import DraftTable
from peagle.drafter.config import DrafterConfig
from peagle.drafter.model import Drafter
from peagle.engine.draft_length import DraftLength
from peagle.engine.draft_planner import DraftPlanner
from peagle.engine.sampling_params import SamplingParams
from peagle.errors import InputError
from peagle.target.model import Target

log = logging.getLogger(__name__)

MAX_CAPTURED_ROWS = 1024  # unless the config says otherwise
# Launching a pass's kernels one by one takes some 30 ms of the host; with more rows than a card computes in that time,
# at a multiply-add for each parameter and row, nothing is gained by a graph.
LAUNCH_SECONDS, OPERATIONS_A_SECOND = 0.03, 400e12
FEWEST_MIXED_ROWS, MOST_MIXED_ROWS = 512, 8192


def check_depth(drafter: Drafter, num_speculative_tokens: int) -> None:
    """Refuse a K of 0 or less; warn of a head asked for more drafts than it was trained for, where it says."""
    if num_speculative_tokens < 1:
        raise InputError(f"num_speculative_tokens: got {num_speculative_tokens}, expected a positive integer")
    k_train = drafter.config.k_train
    if k_train is not None and num_speculative_tokens > k_train:
        log.warning(
            "num_speculative_tokens %d is more than the %d that the head was trained for: later drafts will seldom be "
            "accepted",
            num_speculative_tokens,
            k_train,
        )


def resolve_window(asked: int | Literal["auto"] | None, head: DrafterConfig, max_model_len: int) -> int | None:
    """How many positions the drafter's rows see (SpeculativeConfig's draft_window); None: all that there can be."""
    check_window(asked)
    window = (head.draft_window or head.max_train_length) if asked == "auto" else asked
    return None if window is None or window >= max_model_len else window


def warn_of_lengths(head: DrafterConfig, max_model_len: int, window: int | None) -> None:
    """Warn of requests that may be longer than what the head can do, or that show it more than it was trained on."""
    if head.max_position_embeddings < max_model_len:
        log.warning(
            "the head is made for %d positions and the engine serves %d: acceptance will be poor beyond",
            head.max_position_embeddings,
            max_model_len,
        )
    elif head.max_train_length is not None and head.max_train_length < (window or max_model_len):
        log.warning(
            "the head was trained on texts of up to %d tokens and sees up to %d (draft_window): acceptance may be poor "
            "beyond",
            head.max_train_length,
            window or max_model_len,
        )


def make_planner(
    config: EngineConfig,
    device: torch.device,
    num_speculative_tokens: int,
    table: DraftTable | None,
    synthetic: bool,
) -> DraftPlanner | None:
    """What decides on the number of drafts: a table, the load, or (None) nothing, so that it is always K.

    A CUDA graph has a fixed K, so with a table a GPU runs without, and by load only a CPU chooses. With synthetic
    acceptance it does not: what it would learn are the rates given.
    """
    dynamic = config.dynamic_speculation
    if table is not None:
        if dynamic:
            raise InputError(
                "dynamic_speculation: got True beside num_speculative_tokens_per_batch_size, expected one of the two"
            )
        if num_speculative_tokens == 0:
            raise InputError("num_speculative_tokens_per_batch_size: given without a drafter, expected none")
        if device.type != "cpu" and not config.enforce_eager:
            raise InputError(
                "num_speculative_tokens_per_batch_size: a step that runs as a CUDA graph always has "
                "num_speculative_tokens drafts; leave it out, or run without graphs (enforce_eager)"
            )
        return DraftPlanner(table=table)
    possible = device.type == "cpu" and not synthetic
    if dynamic and num_speculative_tokens and not possible:
        reason = "with synthetic acceptance" if synthetic else f"on {device.type}, where steps have fixed shapes"
        raise InputError(f"dynamic_speculation: got True {reason}, expected False")
    if dynamic is False or num_speculative_tokens == 0 or not possible:
        return None
    return DraftPlanner(length=DraftLength(num_speculative_tokens))


def check_threshold(threshold: float, device: torch.device, is_planned: bool) -> None:
    """Refuse a confidence threshold where steps have fixed shapes, or where the load decides already."""
    if threshold and device.type != "cpu":
        raise InputError(
            f"confidence_threshold: got {threshold} on {device.type}, where steps have fixed shapes, expected 0"
        )
    if threshold and is_planned:
        raise InputError(
            f"confidence_threshold: got {threshold} beside dynamic_speculation or "
            "num_speculative_tokens_per_batch_size, expected one of the two"
        )


def captured_rows(config: EngineConfig, device: torch.device, num_speculative_tokens: int) -> int:
    """The most target rows of a step that runs in fixed shapes, as CUDA graphs; 0: none does."""
    if config.enforce_eager or (device.type != "cuda" and config.num_scheduler_steps == 1):
        return 0
    if config.max_cudagraph_capture_size is not None:
        return config.max_cudagraph_capture_size
    return min(config.max_num_seqs * (num_speculative_tokens + 1), MAX_CAPTURED_ROWS)


def mixed_rows(config: EngineConfig, device: torch.device, max_num_batched_tokens: int, num_params: int) -> int:
    """The most rows of a step with prompts in it whose passes are padded, as CUDA graphs; 0: none are. num_params: of
    the target's layers."""
    if config.enforce_eager or device.type != "cuda":
        return 0
    limit = config.max_cudagraph_capture_size
    if limit is None:
        worth = LAUNCH_SECONDS * OPERATIONS_A_SECOND / (2 * max(num_params, 1))
        limit = int(min(max(worth, FEWEST_MIXED_ROWS), MOST_MIXED_ROWS))
    return min(limit, max_num_batched_tokens)


def runs_ahead(config: EngineConfig, device: torch.device) -> bool:
    """Whether steps start early. On a CPU nothing is gained by that, as the host is the device."""
    return config.async_scheduling and device.type == "cuda"


def check_prompt(prompt_token_ids: Sequence[int], max_model_len: int, vocab_size: int) -> list[int]:
    """A prompt's token ids, refused when there are none, too many, or ones that the model does not know."""
    try:
        prompt = [index(token) for token in prompt_token_ids]  # int() would take 1.7 and "1"
    except TypeError as error:
        raise InputError(f"prompt: got a token id that is no integer ({error}), expected integers") from error
    if not prompt:
        raise InputError("prompt: got no tokens, expected at least one")
    if len(prompt) >= max_model_len:
        raise InputError(
            f"prompt: got {len(prompt)} tokens, expected at most {max_model_len - 1} (max_model_len is "
            f"{max_model_len}, and one token is left for the answer)"
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        bad = next(token for token in prompt if not 0 <= token < vocab_size)
        raise InputError(f"prompt: got token id {bad}, expected 0 to {vocab_size - 1}")
    return prompt


def check_params(params: SamplingParams, target: Target) -> None:
    """Refuse sampling parameters that this target cannot serve."""
    if params.stop_strings and target.tokenizer is None:
        raise InputError("stop: the model has no tokenizer, so strings cannot be looked for; use stop_token_ids")
    for field, ids in (("stop_token_ids", params.stop_token_ids or ()), ("logit_bias", params.logit_bias or ())):
        for token in ids:
            if token >= target.vocab_size:
                raise InputError(f"{field}: got {token}, expected ids below {target.vocab_size}")
    if params.n != 1:
        raise InputError(f"n: got {params.n}, expected 1 a request (SamplingParams.completions gives them)")


def check_min_tokens(min_tokens: int, room: int, max_model_len: int) -> None:
    """Refuse to hold an answer's end back beyond the length that it can have."""
    if min_tokens > room:
        raise InputError(
            f"min_tokens: got {min_tokens}, expected at most {room}: max_model_len is {max_model_len}, "
            "the prompt included"
        )


def count_logprobs(name: str, asked: int | None, max_logprobs: int, vocab_size: int) -> int:
    """How many of the likeliest tokens to report, -1 for no report."""
    if asked is None:
        return -1
    count = vocab_size if asked == -1 else asked
    if count > (vocab_size if max_logprobs == -1 else max_logprobs):
        raise InputError(f"{name}: got {asked}, expected at most {max_logprobs} (max_logprobs)")
    return min(count, vocab_size)
