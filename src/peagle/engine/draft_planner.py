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


class DraftPlanner:
    """Writes a plan's `drafting`. The number of drafts is a table's, by the number of requests in the step, or what
    `length` chooses; exactly one of the two is given.

    held: a number of drafts that counts instead, while steps are timed at start-up.
    """

    def __init__(self, table: DraftTable | None = None, length: DraftLength | None = None) -> None:
        assert (table is None) != (length is None)
        self.table, self.length = table, length
        self.held: int | None = None

    def plan(self, requests: Sequence[Request], plan: StepPlan) -> None:
        """Decide which requests of a plan draft, and how much.

        Where no drafts are wanted the drafter's rows are put off. A request that is to draft first makes up its own, a
        limited number a step, those with the fewest before the others; until it has none left it decodes plainly.
        """
        speculates = [request.num_speculative_tokens > 0 for request in requests]
        behind = [max(start - r.drafter_computed, 0) for start, r in zip(plan.starts, requests, strict=True)]
        rows_behind = sum(n for n, s in zip(behind, speculates, strict=True) if s)
        k, scouts = self._choose(len(requests), rows_behind)
        count, room = len(requests), MAKE_UP_ROWS
        drafting = DraftingPlan(
            [0] * count, [False] * count, [request.drafter_computed for request in requests], [0] * count
        )
        # a prompt's rows are no drafts yet, so a scout is one that chooses a token
        order = sorted(range(count), key=lambda i: (not plan.samples[i], behind[i]))
        for i in order:
            own = requests[i].num_speculative_tokens
            if own == 0 or (k == 0 and not scouts):
                continue
            wanted = own if scouts else min(k, own)
            scouts = False
            drafting.make_up[i] = min(behind[i], room)
            room -= drafting.make_up[i]
            if drafting.make_up[i] == behind[i]:
                drafting.runs[i], drafting.wanted[i] = True, wanted
        plan.drafting = drafting

    def _choose(self, num_requests: int, rows_behind: int) -> tuple[int, bool]:
        """The number of drafts, and whether one request is to draft more."""
        if self.held is not None:
            return self.held, False
        if self.length is None:
            assert self.table is not None
            return drafts_at(self.table, num_requests), False
        k = self.length.choose(num_requests, rows_behind)
        return k, self.length.scouts(k)

    def observe(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Learn from a step that took so many seconds."""
        if self.length is None or plan.drafting is None:
            return
        self.length.steps += 1
        made_up = sum(plan.drafting.make_up)
        if made_up >= MEASURED_ROWS:
            self.length.observe_make_up(made_up, result.make_up_seconds)
        k = steady_drafts(plan)
        if self.held is not None:
            if k == self.held:
                self.length.costs[k].seed(len(plan.lanes), seconds)
            return
        for drafted, accepted in zip(plan.num_drafts, result.num_accepted, strict=True):
            if drafted:
                self.length.observe_drafts(drafted, accepted)
        if k is not None:
            self.length.observe_step(len(plan.lanes), k, seconds)


def steady_drafts(plan: StepPlan) -> int | None:
    """The k of a step in which every request verifies k drafts and gets k new ones, None for any other.

    A few requests may draft less, near their length limits.
    """
    assert plan.drafting is not None
    wanted, runs = plan.drafting.wanted, plan.drafting.runs
    k = wanted[0]
    decodes = all(plan.samples) and all(
        rows == 1 + drafts for rows, drafts in zip(plan.query_lens, plan.num_drafts, strict=True)
    )
    if not decodes or any(plan.drafting.make_up) or any(n != k for n in wanted) or any(run != (k > 0) for run in runs):
        return None
    drafts = sum(plan.num_drafts)
    return k if max(plan.num_drafts) <= k and drafts >= 0.9 * k * len(wanted) else None
