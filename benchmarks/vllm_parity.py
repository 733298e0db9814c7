"""Do heads work in stock vLLM on the CPU as they do here: its plain decoding's tokens, the same acceptance length?

usage: python benchmarks/vllm_parity.py TARGET HEAD... --prompts FILE:N --vllm-python PATH/TO/VLLM/bin/python

The same prompts, as token ids, go through four decodings, all greedy: vLLM plain, vLLM with the head, ours plain, ours
with the head. vLLM runs in its own environment, one process per decoding, which runs this file again and exchanges
JSON files with it. Compared are:

- the tokens of each engine with the head against that engine's own plain decoding, and plain against plain; each first
  divergence comes with the gap between the two tokens' logits after the common prefix (float32, no cache): near 0 it
  is a tie that rounding decided, anything larger is an error;
- AL, as each engine counts it: 1 + accepted / drafts. vLLM counts what was verified, ours what was kept when a stop or
  a length limit cuts a run, so AL of vLLM also has the tokens behind the end of an answer;
- kept/step: (output tokens - answers) / decoding steps, which both count alike (the first token of an answer comes from
  the prefill). Ours plans a step without drafts where a single token is left; its token counts here and the step does
  not, which raises ours a little.

On a CPU each decoding takes minutes. With --work FOLDER each one's result is kept there, and a run that was broken off
goes on from what is there; without it they last until the program ends. Vary nothing but heads and K between runs that
share a folder: a result is taken when engine, target, prompts and settings are the same, whatever the code.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

WITHIN = 0.05  # the two acceptance lengths, relative


def run_vllm(job: dict[str, Any]) -> dict[str, Any]:
    """One decoding in stock vLLM, in its environment. Only vLLM is imported here."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    import vllm

    started = time.perf_counter()
    llm = vllm.LLM(
        job["target"],
        dtype=job["dtype"],
        enforce_eager=True,  # compiled output is wrong on the CPU even without speculation
        max_model_len=job["max_model_len"],
        max_num_seqs=job["max_num_seqs"],
        speculative_config=job["speculative_config"],
        disable_log_stats=False,  # the acceptance counts are among them
        seed=0,
    )
    loading = time.perf_counter() - started
    params = vllm.SamplingParams(temperature=0.0, max_tokens=job["max_tokens"])
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    counts: dict[str, Any] = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_")
        if name != metric.name:
            counts[name] = metric.values if hasattr(metric, "values") else metric.value
    return {
        "version": vllm.__version__,
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "num_drafts": counts.get("num_drafts", 0),
        "num_accepted_tokens": counts.get("num_accepted_tokens", 0),
        "accepted_per_pos": list(counts.get("num_accepted_tokens_per_pos", [])),
        "seconds": seconds,
        "loading_seconds": loading,
    }


def vllm_stage(job_path: str) -> None:
    """Entry of the subprocess: job file in, result file beside it out."""
    result = run_vllm(json.loads(Path(job_path).read_text()))
    Path(job_path + ".out").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # vLLM's own shutdown on the CPU can hang


def ask_vllm(python: str, job: dict[str, Any]) -> dict[str, Any]:
    """`run_vllm` in a subprocess; ends this program with vLLM's own words where that fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        env = os.environ | {"HF_HUB_OFFLINE": "1"}
        env.pop("PYTHONPATH", None)  # its environment, not ours
        command = [python, str(Path(__file__).resolve()), "--vllm-stage", str(path)]
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        out = Path(str(path) + ".out")
        if not out.is_file():
            sys.exit(f"vLLM failed (exit status {done.returncode}):\n{done.stdout[-6000:]}")
        return json.loads(out.read_text())


def once(work: Path | None, engine: str, job: dict[str, Any], run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """`run()`, or what it gave for the same job in an earlier run."""
    if work is None:
        return run()
    key = hashlib.sha256(json.dumps([engine, job], sort_keys=True).encode()).hexdigest()[:16]
    kept = work / f"{engine}-{key}.json"
    if not kept.is_file():
        work.mkdir(parents=True, exist_ok=True)
        result = run()
        part = kept.with_suffix(".part")
        part.write_text(json.dumps(result))
        os.replace(part, kept)
    return json.loads(kept.read_text())


def compare(target: Any, prompts: list[list[int]], plain: list[list[int]], other: list[list[int]]) -> dict[str, Any]:
    """How many answers are the same, and every first divergence with its logit gap."""
    from peagle.engine.parity import first_divergence, logit_gap

    differences = []
    for i, (prompt, a, b) in enumerate(zip(prompts, plain, other, strict=True)):
        found = first_divergence(a, b)
        if found is not None:
            gap = logit_gap(target, prompt, a, found)
            differences.append(
                {
                    "prompt": i,
                    "index": found.index,
                    "plain_token": found.reference_id,
                    "other_token": found.other_id,
                    "logit_gap": gap if gap < float("inf") else None,
                }
            )
    return {"equal": len(prompts) - len(differences), "of": len(prompts), "differences": differences}


def kept_per_step(token_ids: list[list[int]], num_drafts: int) -> float:
    """Output tokens a decoding step; answers' first tokens come from the prefill."""
    return (sum(map(len, token_ids)) - len(token_ids)) / num_drafts if num_drafts else 1.0


def describe(name: str, found: dict[str, Any]) -> list[str]:
    lines = [f"{name}: {found['equal']} of {found['of']} answers the same"]
    for d in found["differences"]:
        gap = "one of them ends" if d["logit_gap"] is None else f"logit gap {d['logit_gap']:.2g}"
        lines.append(f"  prompt {d['prompt'] + 1}, token {d['index'] + 1}: {gap}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("heads", nargs="+", metavar="HEAD")
    parser.add_argument(
        "--prompts", action="append", required=True, metavar="FILE[:LIMIT]", help="first turns are used"
    )
    parser.add_argument("--vllm-python", required=True, metavar="PATH", help="Python of an environment with vLLM")
    parser.add_argument("--k", default="5", metavar="K,K,...", help="draft tokens a step (default 5)")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="keep each decoding's result, and go on from them")
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args(argv)

    from peagle.bench.conversations import Chat
    from peagle.bench.json_file import check_writable, write_json
    from peagle.bench.machine import machine_facts
    from peagle.bench.tables import align
    from peagle.cli.eval import head_names, parse_ks, prompt_spec
    from peagle.data.prompts import load_prompts
    from peagle.drafter.loading import read_config, resolve_head
    from peagle.engine.llm import LLM
    from peagle.engine.sampling_params import SamplingParams
    from peagle.target.loading import load_target, resolve_model

    if args.json is not None:
        check_writable(args.json)
    ks = parse_ks(args.k)
    target_folder = resolve_model(args.target)  # vLLM reads no wheel and our conversion of a GGUF file
    target = load_target(target_folder, args.dtype, "cpu")
    chat = Chat(target)
    prompts = [chat.first(prompt) for prompt in load_prompts([prompt_spec(spec) for spec in args.prompts])]

    def job(speculative: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "target": target_folder,
            "dtype": args.dtype,
            "max_model_len": args.max_model_len,
            "max_num_seqs": args.max_num_seqs,
            "max_tokens": args.max_tokens,
            "speculative_config": speculative,
            "prompts": prompts,
        }

    def vllm(speculative: dict[str, Any] | None) -> dict[str, Any]:
        asked = job(speculative)
        return once(args.work, "vllm", asked, lambda: ask_vllm(args.vllm_python, asked))

    def ours(speculative: dict[str, Any] | None) -> dict[str, Any]:
        return once(args.work, "ours", job(speculative), lambda: run_ours(speculative))

    def run_ours(speculative: dict[str, Any] | None) -> dict[str, Any]:
        llm = LLM(target, speculative, max_model_len=args.max_model_len, max_num_seqs=args.max_num_seqs)
        params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
        started = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        spec = llm.stats.spec
        return {
            "token_ids": [output.outputs[0].token_ids for output in outputs],
            "num_drafts": spec.num_drafts,
            "num_accepted_tokens": spec.num_accepted_tokens,
            "accepted_per_pos": spec.accepted_per_pos,
            "seconds": time.perf_counter() - started,
        }

    specs = {
        f"{name} K={k}": {"method": "eagle3", "model": str(resolve_head(head).resolve()), "num_speculative_tokens": k}
        | ({"parallel_drafting": True} if read_config(resolve_head(head)).kind == "p-eagle" else {})
        for name, head in zip(head_names(args.heads), args.heads, strict=True)
        for k in ks
    }
    print(f"{len(prompts)} prompts, {args.max_tokens} tokens at most, {args.dtype}, greedy", flush=True)
    plain_vllm = vllm(None)
    print(f"vLLM {plain_vllm['version']}: plain decoding done", flush=True)
    plain_ours = ours(None)
    plain = compare(target, prompts, plain_ours["token_ids"], plain_vllm["token_ids"])
    lines = describe("plain decoding, vLLM against ours", plain)
    header = [
        "head",
        "vLLM AL",
        "ours AL",
        "diff",
        "vLLM kept/step",
        "ours kept/step",
        "diff",
        "vLLM same",
        "ours same",
    ]
    table = [header]
    results = {}
    failed = False
    for name, spec in specs.items():
        theirs, own = vllm(spec), ours(spec)
        print(f"{name}: done", flush=True)
        row: dict[str, Any] = {"speculative_config": spec, "vllm": theirs, "ours": own}
        for side, reference in (("vllm", plain_vllm), ("ours", plain_ours)):
            side_row = row[side]
            side_row["acceptance_length"] = 1 + side_row["num_accepted_tokens"] / max(1, side_row["num_drafts"])
            side_row["kept_per_step"] = kept_per_step(side_row["token_ids"], side_row["num_drafts"])
            side_row["against_plain"] = compare(target, prompts, reference["token_ids"], side_row["token_ids"])
            lines += describe(f"{name}, {side} against its plain decoding", side_row["against_plain"])
        row["across"] = compare(target, prompts, own["token_ids"], theirs["token_ids"])
        relative = {key: theirs[key] / own[key] - 1 for key in ("acceptance_length", "kept_per_step")}
        row["relative_difference"] = relative
        failed |= abs(relative["acceptance_length"]) > WITHIN
        cells = [name]
        for key in ("acceptance_length", "kept_per_step"):
            cells += [f"{theirs[key]:.3f}", f"{own[key]:.3f}", f"{relative[key]:+.1%}"]
        cells += [f"{r['against_plain']['equal']}/{len(prompts)}" for r in (theirs, own)]
        table.append(cells)
        results[name] = row
    print("\n" + align(table) + "\n\n" + "\n".join(lines))
    if args.json is not None:
        settings = {key: value for key, value in vars(args).items() if key not in ("json", "vllm_python", "work")}
        machine = machine_facts(target.device, target.dtype)
        content = {"settings": settings, "machine": machine, "prompts": prompts, "plain": plain, "results": results}
        write_json(args.json, content | {"plain_vllm": plain_vllm, "plain_ours": plain_ours})
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--vllm-stage"]:
        vllm_stage(sys.argv[2])
    sys.exit(main())
