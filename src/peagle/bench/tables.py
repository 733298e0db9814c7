"""Results as text: columns aligned by spaces, nothing that a log file could not hold."""

from __future__ import annotations

from collections.abc import Sequence

from peagle.bench.acceptance import Acceptance
from peagle.bench.compare import describe
from peagle.engine.stats import CONTEXT_BIN


def align(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows of equal length as lines; the first `left` columns are flush left, the others flush right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def sampling_name(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def context_table(results: Sequence[Acceptance]) -> str:
    """Acceptance length of each head by the length of the context, a row a bin, with the steps that it rests on."""
    sections = []
    for prompt_set, temperature, k in dict.fromkeys((r.prompt_set, r.temperature, r.k) for r in results):
        members = [r for r in results if (r.prompt_set, r.temperature, r.k) == (prompt_set, temperature, k)]
        lengths = [r.by_context.acceptance_lengths() for r in members]
        rows = [["context", *(cell for r in members for cell in (f"{r.head} AL", "steps"))]]
        for first in sorted(set().union(*lengths)):
            row = [f"{first}..{first + CONTEXT_BIN - 1}"]
            for r, found in zip(members, lengths, strict=True):
                steps = r.by_context.num_drafts.get(first // CONTEXT_BIN, 0)
                row += [f"{found[first]:.2f}" if first in found else "", str(steps)]
            rows.append(row)
        sections.append(f"{prompt_set}, {sampling_name(temperature)}, K = {k}, by context length\n{align(rows)}")
    return "\n\n".join(sections)


def acceptance_table(results: Sequence[Acceptance]) -> str:
    """The table of `peagle eval`: heads side by side within each prompt set, temperature and K.

    Each result takes two lines, joint and conditional rates, one column a position.
    """
    depth = max(result.k for result in results)
    sections: list[str] = []
    groups = dict.fromkeys((r.prompt_set, r.temperature) for r in results)
    for prompt_set, temperature in groups:
        members = [r for r in results if (r.prompt_set, r.temperature) == (prompt_set, temperature)]
        rows = [["K", "head", "AL", "tokens", "rate", *(str(i + 1) for i in range(depth))]]
        for result in sorted(members, key=lambda r: r.k):  # stable: heads stay in the order given
            spec = result.spec
            rows.append(
                [
                    str(result.k),
                    result.head,
                    f"{spec.acceptance_length:.2f}",
                    str(result.num_output_tokens),
                    "joint",
                    *_rates(spec.joint_rates, depth),
                ]
            )
            rows.append(["", "", "", "", "conditional", *_rates(spec.conditional_rates, depth)])
        first = members[0]
        title = f"{prompt_set}, {sampling_name(temperature)}: {first.num_prompts} prompts, {first.num_turns} answers"
        if first.num_skipped:
            title += f" ({first.num_skipped} turns left out: too long for the model, or beyond its chat template)"
        sections.append(f"{title}\n{align(rows, left=2)}")
    return "\n\n".join(sections)


def _rates(rates: Sequence[float], depth: int) -> list[str]:
    return [f"{rate:.3f}" for rate in rates] + [""] * (depth - len(rates))


def check_lines(results: Sequence[Acceptance]) -> list[str]:
    """What `--check` found, a line a result."""
    lines = []
    for result in results:
        check = result.check
        if check is None:
            continue
        what = f"{result.head} K={result.k}, {result.prompt_set}, {sampling_name(result.temperature)}"
        if check.first is None:
            lines.append(f"{what}: all {check.num_answers} answers equal plain decoding's")
        else:
            lines.append(
                f"{what}: {check.num_equal} of {check.num_answers} answers equal plain decoding's; "
                f"first difference: {describe(check.first)}"
            )
    return lines
