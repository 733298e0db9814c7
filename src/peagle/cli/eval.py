"""`peagle eval`: how many drafts a head gets accepted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from peagle.errors import InputError

if TYPE_CHECKING:
    from peagle.bench.acceptance import PromptSet
    from peagle.bench.conversations import Answers


def parse_ks(text: str) -> list[int]:
    """`3,5,7` -> [3, 5, 7]."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"--k: got {text!r}, expected positive whole numbers separated by commas, such as 3,5,7")
    return list(dict.fromkeys(map(int, parts)))


def parse_window(text: str) -> int | Literal["auto"] | None:
    """`2048` -> 2048, `all` -> None, `auto` as it is."""
    if text == "auto":
        return "auto"
    if text == "all":
        return None
    if not text.isdecimal() or not int(text):
        raise InputError(f"--draft-window: got {text!r}, expected a positive whole number, all or auto")
    return int(text)


def prompt_spec(text: str) -> str:
    """`FILE:20` is short for `FILE:limit=20`."""
    return re.sub(r":(\d+)$", r":limit=\1", text)


def head_names(heads: list[str]) -> list[str]:
    """Short names for heads: the folder's, or the whole path where two folders have the same name."""
    short = [Path(head).name or head for head in heads]
    return short if len(set(short)) == len(short) else list(heads)


def evaluate(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="Target model: a folder, a Hub id, a GGUF file or wheel:NAME.")
    ],
    heads: Annotated[
        list[str], typer.Argument(metavar="HEAD...", help="Heads (P-EAGLE or EAGLE-3), compared side by side.")
    ],
    prompts: Annotated[
        list[str],
        typer.Option(
            metavar="FILE",
            help="Prompt file, FILE[:LIMIT] or FILE[:option=value]..., or hub:OWNER/NAME; may be given several times. "
            "All turns of a conversation are asked, with the model's own answers in between.",
        ),
    ],
    k: Annotated[
        str, typer.Option("--k", metavar="K,K,...", help="Draft tokens a step, separated by commas.")
    ] = "3,5,7",
    temperature: Annotated[
        list[float], typer.Option(metavar="T", help="Sampling temperature, 0 for greedy; may be given several times.")
    ] = [0.0],  # noqa: B006  (typer copies it)
    top_k: Annotated[int, typer.Option(metavar="N", help="Sample among so many tokens; 0 for all.")] = 0,
    top_p: Annotated[float, typer.Option(metavar="P", help="Sample within this probability mass.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Longest answer.")] = 512,
    batch_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Requests at once; default 8 on a CPU, 128 on a GPU.")
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(metavar="N", help="Longest conversation in tokens; default: what the model and memory allow."),
    ] = None,
    draft_window: Annotated[
        str,
        typer.Option(
            metavar="N", help="Positions that a head's rows see: a number, all, or auto (what the head says)."
        ),
    ] = "auto",
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="DTYPE", help="auto, float32, bfloat16 or float16.")
    ] = "auto",
    device: Annotated[
        str | None, typer.Option("--device", metavar="DEVICE", help="cpu or cuda; default: cuda where there is one.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="CPU threads; default: PyTorch's choice.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of sampled answers.")] = 0,
    check: Annotated[
        bool, typer.Option("--check", help="Also decode plainly and say whether every answer is the same.")
    ] = False,
    by_context: Annotated[
        bool, typer.Option("--by-context", help="Also print acceptance lengths by the length of the context.")
    ] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write all counts and rates to this file.")
    ] = None,
) -> None:
    """Acceptance length and rates of heads on prompts, greedy or sampled, without a server.

    AL is the acceptance length: 1 + accepted drafts / verification steps, the target's own token included. The
    conditional rate at position i is the share of accepted drafts there, of the steps that drafted so far and had all
    drafts before it accepted; the joint rate is the product of the conditional rates up to i. Where every step drafts K
    it is the share of steps whose first i drafts were all accepted; steps near an answer's length limit draft less.
    """
    ks = parse_ks(k)
    specs = [prompt_spec(text) for text in prompts]
    window = parse_window(draft_window)

    from peagle.bench.json_file import check_writable, write_json

    if json_path is not None:
        check_writable(json_path)

    import torch
    from transformers.utils.logging import set_verbosity_error

    from peagle.bench.acceptance import evaluate_head
    from peagle.bench.machine import machine_facts, machine_line
    from peagle.bench.tables import acceptance_table, check_lines, context_table
    from peagle.config.engine import EngineConfig
    from peagle.config.speculative import SpeculativeConfig
    from peagle.engine.loading import load_engine
    from peagle.engine.sampling_params import SamplingParams
    from peagle.target.facts import read_target_facts
    from peagle.target.head_fit import check_head
    from peagle.target.loading import load_target

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature[0], top_k=top_k, top_p=top_p, seed=seed)
    for value in temperature[1:]:
        SamplingParams(temperature=value)  # refuses it before anything is loaded
    prompt_sets = load_prompt_sets(specs)
    if threads is not None:
        torch.set_num_threads(threads)
    set_verbosity_error()
    for head in heads:  # all of them, before the first one's answers are made
        check_head(head, read_target_facts(target))
    loaded = load_target(target, dtype, device)
    facts = machine_facts(loaded.device, loaded.dtype)
    typer.echo(f"{target} · {machine_line(facts)}", err=True)
    config = EngineConfig(
        max_num_seqs=batch_size or (128 if loaded.device.type == "cuda" else 8), max_model_len=max_model_len
    )
    results = []
    plain_answers: dict[tuple[str, float], Answers] | None = {} if check else None
    for name, head in zip(head_names(heads), heads, strict=True):
        engine = load_engine(loaded, SpeculativeConfig(head, max(ks), draft_window=window), config=config)
        assert engine.drafter is not None
        with Progress(name) as progress:
            results += evaluate_head(
                engine,
                loaded,
                name,
                engine.drafter.config.kind,
                prompt_sets,
                ks,
                temperature,
                params,
                plain_answers,
                progress.update,
            )
        del engine
    typer.echo(acceptance_table(results))
    if by_context:
        typer.echo("\n" + context_table(results))
    if check:
        typer.echo("\n" + "\n".join(check_lines(results)))
    if json_path is not None:
        settings = {
            "target": target,
            "heads": heads,
            "prompts": prompts,
            "max_tokens": max_tokens,
            "top_k": top_k,
            "top_p": top_p,
            "seed": seed,
            "batch_size": config.max_num_seqs,
            "draft_window": draft_window,
        }
        write_json(json_path, {"settings": settings, "machine": facts, "results": [r.to_dict() for r in results]})


def load_prompt_sets(specs: list[str]) -> list[PromptSet]:
    """Each `--prompts` as a set of its own, under the name of its file."""
    from peagle.bench.acceptance import PromptSet
    from peagle.data.prompts import load_prompts, parse_source

    names = [parse_source(spec).name for spec in specs]
    if len(set(names)) < len(names):
        names = specs
    return [PromptSet(name, load_prompts([spec])) for name, spec in zip(names, specs, strict=True)]


class Progress:
    """A bar for each pass over a prompt set, on stderr where that is a terminal."""

    def __init__(self, head: str) -> None:
        self.head = head
        self._bar: Any = None
        self._pass: tuple[object, ...] = ()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, prompt_set: PromptSet, temperature: float, k: int, done: int) -> None:
        """`evaluate_head`'s on_turn."""
        from tqdm import tqdm

        this = (prompt_set.name, temperature, k)
        if this != self._pass:
            self.__exit__()
            how = f"K={k}" if k else "plain"
            desc = f"{self.head} {how} {prompt_set.name} t={temperature:g}"
            # disable=None: silent where stderr is no terminal
            self._bar = tqdm(total=prompt_set.num_turns, desc=desc, unit="answer", disable=None, dynamic_ncols=True)
            self._pass = this
        self._bar.update(done - self._bar.n)
