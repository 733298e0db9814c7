"""`peagle inspect`: what a head is, whether it fits, and what each engine needs to run it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from peagle.drafter.facts import HeadFacts
    from peagle.target.facts import TargetFacts
    from peagle.vllm.installation import Installed

NOT_USABLE = 1  # exit status for a head with problems


def inspect(
    head: Annotated[str, typer.Argument(metavar="HEAD", help="A head's folder or Hub id.")],
    target: Annotated[
        str | None,
        typer.Option(
            "--target", metavar="TARGET", help="Say too whether it fits this model (only its config is read)."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Describe a head from its config and its files' headers; no weights are read, and all problems are listed.

    Of each engine it says whether it takes the head, with the target where one is given, by the checks of `peagle
    serve`; what is known to fail at start in the installed vLLM is a reason of vLLM's. Exit status 1 when the head has
    problems, does not fit the target, or no engine takes the two.
    """
    from peagle.drafter.facts import read_head_facts
    from peagle.target.facts import read_target_config, target_facts
    from peagle.target.loading import resolve_model
    from peagle.target.refusal import engine_refusal
    from peagle.vllm.installation import find_vllm
    from peagle.vllm.needs import peagle_needs

    facts, config, target_is, refusal = read_head_facts(head), None, None, None
    if target is not None:
        config = read_target_config(resolve_model(target), target)
        target_is, refusal = target_facts(config, target), engine_refusal(config, target)
    content = describe_head(facts, target_is, refusal, find_vllm())
    ours = content["engines"]["peagle"]
    ours["needs"] = peagle_needs(facts, config, target or "") if ours["takes"] else None
    if as_json:
        typer.echo(json.dumps(content, indent=2, ensure_ascii=False))
    else:
        typer.echo(as_text(content))
    fit = content["target"]
    unusable = not any(engine["takes"] for engine in content["engines"].values())
    if content["problems"] or (fit is not None and not fit["fits"]) or unusable:
        raise typer.Exit(NOT_USABLE)


def describe_head(
    facts: HeadFacts, target: TargetFacts | None, refusal: str | None, installed: Installed | None
) -> dict[str, Any]:
    """What `peagle inspect` says but for our engine's needs, as JSON. refusal: our engine's, of the target."""
    from dataclasses import asdict

    from peagle.target.head_fit import target_problems, target_warnings
    from peagle.vllm.needs import head_traits, serving_problems, vllm_minimum
    from peagle.vllm.serve import version_problem
    from peagle.vllm.versions import certain_failures, known_problems, parse_version

    config = facts.config
    problems = target_problems(facts, target) if target is not None else []
    fit = None
    if target is not None:
        fits = config is not None and not problems and not facts.problems
        fit = {**asdict(target), "fits": fits, "problems": problems, "warnings": target_warnings(facts, target)}
    # only what hangs on this head: general remarks on vLLM are printed by serve and stand in the docs
    traits = head_traits(facts, target)
    known = [p for p in known_problems(None, traits) if p.trait != "any"]
    version = None if installed is None else installed.version
    fails_here = certain_failures(None if version is None else parse_version(version), traits)
    ours = [*facts.problems, *problems, *([] if refusal is None else [refusal])]
    too_old = version_problem(installed)
    vllms = [*serving_problems(facts, target), *([] if too_old is None else [too_old])]
    vllms += [f"will fail in the installed vLLM {version}: {p.what}; {p.instead}" for p in fails_here]
    return {
        "head": facts.name,
        "layout": facts.layout,
        "kind": None if config is None else config.kind,
        "made_for": facts.target_name or None,
        "config": None if config is None else config.to_dict(),
        "shares": shared_parts(facts),
        "size_bytes": facts.num_bytes,
        "num_parameters": facts.num_parameters,
        "tensors": {name: [t.dtype, list(t.shape)] for name, t in sorted(facts.tensors.items())},
        "problems": facts.problems,
        "target": fit,
        "engines": {
            "peagle": {"takes": not ours, "problems": ours},
            "vllm": {
                "takes": not vllms,
                "problems": vllms,
                "installed": version,
                "needs": vllm_minimum(facts),
                "known": [
                    {
                        "versions": p.versions,
                        "what": p.what,
                        "instead": p.instead,
                        "fails_at_start": p.fails_at_start,
                        "fails_here": p in fails_here,
                    }
                    for p in known
                ],
            },
        },
    }


def shared_parts(facts: HeadFacts) -> list[str]:
    """What the head takes from the target instead of bringing it."""
    if facts.config is None:
        return []
    own = {"embeddings": facts.config.own_embed_tokens, "LM head": facts.config.own_lm_head}
    return [part for part, present in own.items() if not present]


def human_size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def as_text(content: dict[str, Any]) -> str:
    """The same for reading."""
    from peagle.bench.tables import align

    config = content["config"]
    rows = [["head", content["head"]], ["layout", content["layout"] or "unknown"]]
    if config is not None:
        kind = {"p-eagle": "P-EAGLE", "eagle3": "EAGLE-3"}[config["kind"]]
        reduced = config["draft_vocab_size"] != config["vocab_size"]
        whole = f"the target's, all {config['vocab_size']} tokens"
        vocabulary = f"{config['draft_vocab_size']} of {config['vocab_size']} tokens" if reduced else whole
        norms = [name for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output") if config[name]]
        rope = config["rope_parameters"]
        rows += [
            ["kind", kind],
            ["layers", str(config["num_hidden_layers"])],
            ["hidden size", f"{config['hidden_size']} (target {config['target_hidden_size']})"],
            ["K trained", str(config["k_train"] or "not said")],
            ["longest training text", str(config["max_train_length"] or "not said")],
            ["sees at most", f"{config['draft_window']} positions" if config["draft_window"] else "not said"],
            ["mask token", "none" if config["mask_token_id"] is None else str(config["mask_token_id"])],
            ["auxiliary layers", ", ".join(map(str, config["aux_hidden_state_layer_ids"])) or "not said"],
            ["draft vocabulary", vocabulary],
            ["options", ", ".join(norms) or "none"],
            ["longest sequence", f"{config['max_position_embeddings']} (RoPE {rope['rope_type']})"],
        ]
    rows += [
        ["shared with the target", " and ".join(content["shares"]) or "nothing"],
        ["size", f"{human_size(content['size_bytes'])}, {content['num_parameters'] / 1e6:.1f}M parameters"],
        ["tensors", str(len(content["tensors"]))],
        ["made for", content["made_for"] or "not said"],
    ]
    lines = [align(rows, left=2)]
    if content["tensors"]:
        shapes = [["", name, t[0], "x".join(map(str, t[1]))] for name, t in content["tensors"].items()]
        lines.append(align(shapes, left=4))
    fit = content["target"]
    if fit is not None:
        verdict = "fits" if fit["fits"] else "does not fit"
        lines.append(f"target {fit['name']} ({fit['model_type']}, {fit['num_layers']} layers): {verdict}")
        lines[-1] += "".join(f"\n  {text}" for text in (*fit["problems"], *fit["warnings"]))
    problems = content["problems"]
    lines.append("problems: none" if not problems else "problems:" + "".join(f"\n  {text}" for text in problems))
    what = "the head" if fit is None else "head and target"
    told = {*problems, *(fit["problems"] if fit is not None else ())}  # above
    engines = []
    for name, engine in (("peagle", content["engines"]["peagle"]), ("vLLM", content["engines"]["vllm"])):
        more = [text for text in engine["problems"] if text not in told]
        verdict = f"takes {what}" if engine["takes"] else f"does not take {what}"
        engines.append(f"{name}: {verdict}" + ("" if engine["takes"] or more else " (for the problems above)"))
        engines += [f"  {text}" for text in more]
        if (needs := engine.get("needs")) and name == "peagle":
            engines += [f"  {text}" for text in needs_text(needs, config)]
    vllm = content["engines"]["vllm"]
    engines.append(f"  needs {vllm['needs']}; {vllm['installed'] or 'none'} is installed here")
    for known in vllm["known"]:
        if not known["fails_here"]:  # that is among its problems
            fails = "will fail in vLLM, " if known["fails_at_start"] else ""
            engines.append(f"  {fails}{known['versions']}: {known['what']}; {known['instead']}")
    lines.append("\n".join(engines))
    return "\n\n".join(lines)


def needs_text(needs: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """What our engine needs, a line each, from `peagle_needs` and the head's config."""
    trained = needs["num_speculative_tokens"]["trained"]
    beyond = "; more drafts are seldom accepted" if config["kind"] == "p-eagle" else ""
    known = "the head does not say what it was trained for" if trained is None else f"trained for {trained}{beyond}"
    lines = [f"num_speculative_tokens: 1 or more; {known}"]
    head, target, here = needs["weights"]["head"], needs["weights"]["target"], needs["here"]
    for device, where in (("gpu", "a GPU"), ("cpu", "a CPU, in float32")):
        sizes = f"{human_size(head[f'{device}_bytes'])} the head"
        if target is not None:
            sizes = f"{human_size(target[f'{device}_bytes'])} the target, {sizes}"
        lines.append(f"weights on {where}: about {sizes}")
    if needs["target_quantized"] is not None:
        lines.append(f"the target is stored in {needs['target_quantized']}: less where it stays so")
    if here["fits"] is not None:
        fits = "they fit" if here["fits"] else "they do not fit"
        lines.append(f"here, on a {here['device'].upper()}, {human_size(here['available_bytes'])} are free: {fits}")
    vocabulary = needs["draft_vocabulary"]
    if vocabulary is not None and vocabulary["problem"] is not None:
        lines.append(f"draft_vocabulary.json cannot be used: {vocabulary['problem']}")
    elif vocabulary is not None:
        share = vocabulary["coverage"]
        covered = "" if share is None else f", {share:.1%} of what stood in the answers"
        lines.append(
            f"draft_vocabulary.json: {vocabulary['listed']} of {config['vocab_size']} tokens{covered}; a CPU drafts "
            "from them"
        )
    elif config["draft_vocab_size"] == config["vocab_size"]:
        lines.append("draft_vocabulary.json: none; a CPU drafts from the whole vocabulary")
    return lines
