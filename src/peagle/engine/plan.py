"""What one step runs, as the scheduler tells the runner: plain integers, neither requests nor tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class LaneSetup:
    """A request takes a lane (its row in the runner's persistent state). Everything about it that a step needs.

    num_prompt: where the output begins. ban_until: output at token positions below this must not be one of ban_ids
    (min_tokens). logit_bias: (token ids, what is added). num_logprobs, num_prompt_logprobs: how many of the likeliest
    tokens to report, -1 for no report; of the prompt, from position prompt_logprobs_from on.
    """

    lane: int
    token_ids: list[int]
    num_speculative_tokens: int
    max_total_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    num_prompt: int
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, ...], tuple[float, ...]] = ((), ())
    num_logprobs: int = -1
    num_prompt_logprobs: int = -1
    prompt_logprobs_from: int = 1
    ban_until: int = 0
    ban_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class DraftingPlan:
    """What the drafter does in a step when it need not keep up with the target; lists parallel to the plan's.

    wanted: how many drafts to propose behind the step's tokens. runs: whether the drafter runs the request's rows of
    this step; else they are put off. first: the first position that has no drafter row yet. make_up: how many rows,
    put off before, are run first, from there on; a request with runs has then none left.
    """

    wanted: list[int]
    runs: list[bool]
    first: list[int]
    make_up: list[int]


@dataclass(slots=True)
class StepPlan:
    """One step over R requests, in parallel lists.

    Request i runs query_lens[i] rows from position starts[i]; the last num_drafts[i] of them are drafts. samples[i]:
    its last real token is among the rows, so that this step chooses a token. new_blocks: (lane, index in its block
    table, block ids) to be entered before the step. drafting None: every request with speculation drafts what it may.
    """

    setups: list[LaneSetup] = field(default_factory=list)
    new_blocks: list[tuple[int, int, list[int]]] = field(default_factory=list)
    lanes: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    query_lens: list[int] = field(default_factory=list)
    num_drafts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    drafting: DraftingPlan | None = None

    def remove(self, lane: int) -> None:
        """Leave out the request of a lane; `drafting` must not be planned yet."""
        i = self.lanes.index(lane)
        for of_requests in (self.lanes, self.starts, self.query_lens, self.num_drafts, self.samples):
            del of_requests[i]
        self.new_blocks = [entry for entry in self.new_blocks if entry[0] != lane]

    def part(self, index: Sequence[int]) -> StepPlan:
        """The plan of some of its requests; setups and blocks, which are entered once for all, are left out."""
        return StepPlan(
            lanes=[self.lanes[i] for i in index],
            starts=[self.starts[i] for i in index],
            query_lens=[self.query_lens[i] for i in index],
            num_drafts=[self.num_drafts[i] for i in index],
            samples=[self.samples[i] for i in index],
        )


@dataclass(slots=True)
class TokenLogprobs:
    """The report on one token: it and the likeliest ones with their logprobs, and its own rank (1: the likeliest)."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int


@dataclass(slots=True)
class StepResult:
    """What came of it, per request of the plan: num_accepted drafts were accepted; tokens holds them and the target's
    own next token (then padding); num_drafts new drafts stand. Meaningless where samples is False.

    logprobs, prompt_logprobs: by index in the plan, for requests that ask: one report for each of the tokens up to the
    target's own last, and for each prompt token that follows one of the step's rows. make_up_seconds: what the drafter
    rows that had been put off took.
    """

    tokens: list[list[int]]
    num_accepted: list[int]
    num_drafts: list[int]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    make_up_seconds: float = 0.0

    @classmethod
    def from_rows(cls, rows: list[list[int]]) -> StepResult:
        """From a request's numbers as the device leaves them: its tokens, how many were accepted, how many drafts
        stand."""
        return cls([row[:-2] for row in rows], [row[-2] for row in rows], [row[-1] for row in rows])
