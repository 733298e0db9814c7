"""Several decoding steps between two looks of the host: throughput for batches whose tokens nobody waits for.

Plain decoding of many requests is bound by the host: it schedules, launches a few hundred kernels and fetches one token
a request. Here the whole step (target, choice, advance) lives on the device, on a GPU as one CUDA graph, and is run
`num_scheduler_steps` times; a request that ends in between has its surplus tokens dropped. vLLM called this multi-step
scheduling. Tokens are those of single steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from peagle.engine.lanes import Lanes
from peagle.engine.plan import StepPlan, StepResult
from peagle.engine.sampler import invert_cdf, uniform
from peagle.target.model import Target
from peagle.target.paged_attention import KVCache, PagedBatch

# Batch sizes that are captured; a batch is padded to the next one (beyond the last: to a multiple of it).
CAPTURE_SIZES = (1, 8, 32, 64, 128, 256, 384, 512, 768, 1024)


def padded_size(requests: int) -> int:
    """The captured batch size that `requests` run in."""
    for size in CAPTURE_SIZES:
        if requests <= size:
            return size
    return -(-requests // CAPTURE_SIZES[-1]) * CAPTURE_SIZES[-1]


@dataclass
class _Batch:
    """Device state of a batch of fixed size B; a row with end 0 is padding and writes nothing.

    token, position, end (prompt and output never exceed it), seed [B] int64; temperature [B] (0: greedy);
    block_tables [B, max_blocks]; query_start [B + 1]; out [steps, B]: the tokens chosen; step [1]: the next row of out.
    """

    token: Tensor
    position: Tensor
    end: Tensor
    seed: Tensor
    temperature: Tensor
    block_tables: Tensor
    query_start: Tensor
    out: Tensor
    step: Tensor


class MultiStep:
    """Runs the part of a plan that only decodes; `fits` says which that is."""

    def __init__(self, target: Target, kv_cache: KVCache, lanes: Lanes, num_steps: int, max_model_len: int) -> None:
        self.target, self.kv_cache, self.lanes = target, kv_cache, lanes
        self.num_steps, self.max_model_len = num_steps, max_model_len
        self._batches: dict[int, _Batch] = {}
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}

    def fits(self, plan: StepPlan) -> list[int]:
        """The requests of the plan that can: they decode one row, and their choices need nothing but a temperature."""
        lanes, lane = self.lanes, np.array(plan.lanes)
        decodes = np.array(plan.samples) & (np.array(plan.query_lens) == 1)
        filtered = (lanes.temperature[lane] > 0) & lanes.filtered[lane]
        adjusted = lanes.biased[lane] | lanes.penalised[lane]
        reported = lanes.num_logprobs[lane] >= 0
        banned = np.array(plan.starts) + 1 < lanes.ban_until[lane]
        return np.flatnonzero(decodes & ~filtered & ~adjusted & ~reported & ~banned).tolist()

    def execute(self, plan: StepPlan) -> StepResult:
        """Decode num_steps tokens for every request; its result reads like a run of accepted drafts."""
        requests = len(plan.lanes)
        lane = np.array(plan.lanes)
        batch = self._load(plan, lane, padded_size(requests))
        sampled = bool((self.lanes.temperature[lane] > 0).any())
        for _ in range(self.num_steps):
            self._step(batch, sampled)
        self._store(batch, lane, np.array(plan.starts))
        tokens = batch.out[:, :requests].T.tolist()
        return StepResult(tokens, [self.num_steps - 1] * requests, [0] * requests)

    def _empty(self, size: int) -> _Batch:
        device, width = self.target.device, self.lanes.block_tables.shape[1]
        zeros = lambda *shape, dtype=torch.int64: torch.zeros(shape, dtype=dtype, device=device)  # noqa: E731
        return _Batch(
            token=zeros(size),
            position=zeros(size),
            end=zeros(size),
            seed=zeros(size),
            temperature=zeros(size, dtype=torch.float32),
            block_tables=zeros(size, width, dtype=torch.int32),
            query_start=torch.arange(size + 1, dtype=torch.int32, device=device),
            out=zeros(self.num_steps, size),
            step=zeros(1),
        )

    def _load(self, plan: StepPlan, lane: np.ndarray, size: int) -> _Batch:
        if size not in self._batches:
            self._batches[size] = self._empty(size)
        batch, lanes, n = self._batches[size], self.lanes, len(lane)
        device = batch.token.device
        start = np.array(plan.starts, dtype=np.int64)
        host = np.zeros((4, size), dtype=np.int64)
        host[:, :n] = start, lanes.max_total[lane], lanes.seed[lane], lane * lanes.width + start
        position, end, seed, where = torch.from_numpy(host).to(device)
        batch.position.copy_(position)
        batch.end.copy_(end)
        batch.seed.copy_(seed)
        batch.token.copy_(lanes.flat_tokens[where])
        temperature = np.zeros(size, dtype=np.float32)
        temperature[:n] = lanes.temperature[lane]
        batch.temperature.copy_(torch.from_numpy(temperature))
        batch.block_tables[:n].copy_(torch.from_numpy(lanes.block_tables[lane]))
        batch.step.zero_()
        return batch

    def _store(self, batch: _Batch, lane: np.ndarray, start: np.ndarray) -> None:
        """Write the tokens behind those known; what lies beyond the buffer goes to its unused last column."""
        width = self.lanes.width
        column = np.minimum(start + 1 + np.arange(self.num_steps)[:, None], width - 1)
        index = torch.from_numpy(lane * width + column).to(batch.out.device)
        self.lanes.flat_tokens[index] = batch.out[:, : len(lane)].int()

    def _step(self, batch: _Batch, sampled: bool) -> None:
        if batch.token.device.type != "cuda":
            self._advance(batch, sampled)
            return
        key = (len(batch.token), sampled)
        if key not in self._graphs:
            self._graphs[key] = self._capture(*key)
        self._graphs[key].replay()

    def _capture(self, size: int, sampled: bool) -> torch.cuda.CUDAGraph:
        """Record one step over the state of this batch size. The trial runs before it see padding only."""
        batch = self._batches[size]
        saved = _Batch(**{name: tensor.clone() for name, tensor in vars(batch).items()})
        batch.end.zero_()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                batch.step.zero_()
                self._advance(batch, sampled)
        torch.cuda.current_stream().wait_stream(side)
        batch.step.zero_()
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool):
            self._advance(batch, sampled)
        for name, tensor in vars(batch).items():
            tensor.copy_(getattr(saved, name))
        return graph

    def _advance(self, batch: _Batch, sampled: bool) -> None:
        """One step of the whole batch, on the device alone."""
        block_size = self.lanes.block_size
        live = batch.position < batch.end
        position = torch.minimum(batch.position, batch.end - 1).clamp(min=0)
        block = batch.block_tables.gather(1, (position // block_size)[:, None])[:, 0].long()
        slots = torch.where(live, block * block_size + position % block_size, -1)
        paged = PagedBatch(
            position, batch.query_start, (position + 1).int(), batch.block_tables, slots, 1, self.max_model_len
        )
        rows = batch.query_start[:-1].long()
        logits, _ = self.target.forward_paged(batch.token, position, paged, self.kv_cache, rows)
        assert logits is not None
        chosen = logits.argmax(dim=-1)
        if sampled:
            heat = torch.where(batch.temperature > 0, batch.temperature, 1.0)
            noise = uniform(batch.seed, batch.position + 1)
            drawn = invert_cdf((logits.float() / heat[:, None]).softmax(dim=-1), noise)
            chosen = torch.where(batch.temperature > 0, drawn, chosen)
        batch.out.index_copy_(0, batch.step, chosen[None])
        batch.token.copy_(chosen)
        batch.position.add_(1)
        batch.step.add_(1)
