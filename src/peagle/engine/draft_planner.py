"""What the drafter does in each step when the number of drafts changes with the load, and what is learned from it."""

from __future__ import annotations

from collections.abc import Sequence

from peagle.draft_table import DraftTable, drafts_at
from peagle.engine.draft_length import DraftLength
from peagle.engine.plan import DraftingPlan, StepPlan, StepResult
from peagle.engine.request import Request

# Most drafter rows that a step makes up: nobody waits long for those of a request that did not draft for long.
MAKE_UP_ROWS = 256
MEASURED_ROWS = 16  # fewer say nothing of what a row takes
SAME_DRAFTS = 0.25  # a request; if proposed and verified drafts differ by more, the step is between two loads


class DraftPlanner:
    """Writes a plan's `drafting`. The number of drafts is a table's, by the number of requests in the step, or what
    `length` chooses; exactly one of the two is given.

    held: a number of drafts that counts instead, while steps are timed at start-up; timed: the shortest of these steps,
    by requests and drafts.
    """

    def __init__(self, table: DraftTable | None = None, length: DraftLength | None = None) -> None:
        assert (table is None) != (length is None)
        self.table, self.length = table, length
        self.held: int | None = None
        self.timed: dict[tuple[int, int], float] = {}

    def plan(self, requests: Sequence[Request], plan: StepPlan) -> None:
        """Decide which requests of a plan draft, and how much.

        Where no drafts are wanted the drafter's rows are put off. A request that is to draft first makes up its own, a
        limited number a step, those with the fewest before the others; until it has none left it decodes plainly.
        """
        count, room = len(requests), MAKE_UP_ROWS
        behind = [max(start - r.drafter_computed, 0) for start, r in zip(plan.starts, requests, strict=True)]
        k = self._choose(count)
        drafting = DraftingPlan(
            [0] * count, [False] * count, [request.drafter_computed for request in requests], [0] * count
        )
        # a prompt's rows are no drafts yet, so a scout is one that chooses a token
        order = sorted(
            (i for i in range(count) if requests[i].num_speculative_tokens > 0),
            key=lambda i: (not plan.samples[i], behind[i]),
        )
        joins = {i for i in order if k > 0 and self._joins(requests[i], count, k)}
        scout = order[0] if order and self._scouts(count, k if joins else 0, behind[order[0]]) else None
        for i in order:
            if i not in joins and i != scout:
                continue
            own = requests[i].num_speculative_tokens
            wanted = own if i == scout else min(k, own)
            drafting.make_up[i] = min(behind[i], room)
            room -= drafting.make_up[i]
            if drafting.make_up[i] == behind[i]:
                drafting.runs[i], drafting.wanted[i] = True, wanted
        plan.drafting = drafting

    def _choose(self, num_requests: int) -> int:
        """How many drafts a request gets."""
        if self.held is not None:
            return self.held
        if self.length is None:
            assert self.table is not None
            return drafts_at(self.table, num_requests)
        return self.length.choose(num_requests)

    def _scouts(self, num_requests: int, k: int, rows_behind: int) -> bool:
        """Whether one request is to draft more."""
        return self.held is None and self.length is not None and self.length.scouts(num_requests, k, rows_behind)

    def _joins(self, request: Request, num_requests: int, k: int) -> bool:
        """Whether it pays for a request to draft; the rows of a prompt that is still to be run cost like others."""
        if self.held is not None or self.length is None:
            return True
        known = len(request.token_ids)
        rows, left = known - 1 - request.drafter_computed, request.max_total_tokens - known
        return self.length.pays(num_requests, k, max(rows, 0), left)

    def observe(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Learn from a step that took so many seconds."""
        if self.length is None or plan.drafting is None:
            return
        self.length.steps += 1
        made_up = sum(plan.drafting.make_up)
        if made_up >= MEASURED_ROWS:
            self.length.observe_make_up(made_up, result.make_up_seconds)
        mean, count = steady_drafts(plan), len(plan.lanes)
        seconds -= result.make_up_seconds
        if self.held is not None:
            if mean == self.held:
                self.timed[count, self.held] = min(self.timed.get((count, self.held), seconds), seconds)
            return
        for drafted, accepted in zip(plan.num_drafts, result.num_accepted, strict=True):
            if drafted:
                self.length.observe_drafts(drafted, accepted)
        if mean is not None:
            self.length.costs.observe(count, mean, seconds)


def steady_drafts(plan: StepPlan) -> float | None:
    """How many drafts a request has in the mean, in a step that only decodes and in which about as many are proposed as
    are verified; None for any other."""
    assert plan.drafting is not None
    rows = zip(plan.query_lens, plan.num_drafts, strict=True)
    if not all(plan.samples) or any(length != 1 + drafts for length, drafts in rows):
        return None
    verified, wanted = sum(plan.num_drafts) / len(plan.lanes), sum(plan.drafting.wanted) / len(plan.lanes)
    return (verified + wanted) / 2 if abs(verified - wanted) <= SAME_DRAFTS else None
