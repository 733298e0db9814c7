"""Acceptance as a server counts it: the difference of its Prometheus counters before and after a run.

The names are vLLM's, which this project's server uses too. Counters of several engine replicas are added up.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from peagle.engine.stats import SpecMetrics

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_POSITION = re.compile(r'(?:^|,)position="(\d{1,4})"')
_MOST = 2**53  # beyond it floats, which servers write, skip numbers


@dataclass(slots=True)
class Counters:
    """What is read of one scrape. has_spec: the server counts drafts at all."""

    has_spec: bool = False
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: dict[int, int] = field(default_factory=dict)
    cache_queries: int | None = None
    cache_hits: int | None = None


def parse_counters(text: str) -> Counters:
    """From the text of /metrics; lines that are not understood are passed over, as scrapers do."""
    found = Counters()
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None or not match["name"].startswith("vllm:"):
            continue
        name = match["name"].removeprefix("vllm:").removesuffix("_total")
        try:
            value = int(float(match["value"]))
        except (ValueError, OverflowError):
            continue
        if not 0 <= value <= _MOST:
            continue
        if name == "spec_decode_num_drafts":
            found.has_spec = True
            found.num_drafts += value
        elif name == "spec_decode_num_draft_tokens":
            found.num_draft_tokens += value
        elif name == "spec_decode_num_accepted_tokens":
            found.num_accepted_tokens += value
        elif name == "spec_decode_num_accepted_tokens_per_pos":
            position = _POSITION.search(match["labels"] or "")
            if position is not None:
                index = int(position[1])
                found.accepted_per_pos[index] = found.accepted_per_pos.get(index, 0) + value
        elif name == "prefix_cache_queries":
            found.cache_queries = (found.cache_queries or 0) + value
        elif name == "prefix_cache_hits":
            found.cache_hits = (found.cache_hits or 0) + value
    return found


def spec_between(before: Counters, after: Counters) -> SpecMetrics | None:
    """Acceptance between two scrapes; None where the server counts no drafts, or its counters went down.

    Servers do not say how many drafts had each position, so every draft counts for every one: joint rates here are
    accepted at the position / all drafts, vLLM's own definition. It differs from the engine's own count in steps that
    a length limit cut short, about one an answer.
    """
    if not after.has_spec:
        return None
    drafts = after.num_drafts - before.num_drafts
    depth = max((*before.accepted_per_pos, *after.accepted_per_pos), default=-1) + 1
    accepted = [after.accepted_per_pos.get(i, 0) - before.accepted_per_pos.get(i, 0) for i in range(depth)]
    draft_tokens = after.num_draft_tokens - before.num_draft_tokens
    accepted_tokens = after.num_accepted_tokens - before.num_accepted_tokens
    if min(drafts, draft_tokens, accepted_tokens, *accepted) < 0:
        return None
    return SpecMetrics(
        num_drafts=drafts,
        num_draft_tokens=draft_tokens,
        num_accepted_tokens=accepted_tokens,
        accepted_per_pos=accepted,
        drafts_per_pos=[drafts] * depth,
    )


def cache_between(before: Counters, after: Counters) -> tuple[int | None, int | None]:
    """Tokens looked up and found in the prefix cache between two scrapes; None where not told, or it went down."""
    if after.cache_queries is None or after.cache_hits is None:
        return None, None
    queries, hits = after.cache_queries - (before.cache_queries or 0), after.cache_hits - (before.cache_hits or 0)
    return (queries, hits) if min(queries, hits) >= 0 else (None, None)


def went_down(before: Counters, after: Counters) -> bool:
    """Whether the server began to count anew between two scrapes."""
    if before.has_spec and (not after.has_spec or spec_between(before, after) is None):
        return True
    return None not in (before.cache_queries, before.cache_hits) and cache_between(before, after) == (None, None)
