"""An engine that says what a test wrote down for it."""

from __future__ import annotations

from collections.abc import Sequence

from peagle.engine.outputs import StepOutput
from peagle.engine.sampling_params import SamplingParams
from peagle.engine.stats import EngineStats

# One verification step of one request: drafted, accepted.
Step = tuple[int, int]


class ScriptedEngine:
    """Every request follows the same script, all requests together; the last step finishes them.

    A step (drafted, accepted) gives accepted + 1 tokens, counted up from the request's last prompt token. answers maps
    a K to tokens that requests of that K get instead, one a step.
    """

    def __init__(
        self, script: Sequence[Step], max_model_len: int = 10_000, answers: dict[int, list[int]] | None = None
    ) -> None:
        self.script = list(script)
        self.max_model_len = max_model_len
        self.answers = answers or {}
        self.stats = EngineStats()
        self.asked: list[tuple[str, list[int], SamplingParams]] = []
        self.most_at_once = 0
        self._running: dict[str, tuple[list[Step], int, list[int] | None]] = {}

    def add_request(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        assert request_id not in self._running
        ids = list(prompt_token_ids)
        self.asked.append((request_id, ids, params))
        own = self.answers.get(params.num_speculative_tokens or 0)
        script = [(0, 0)] * len(own) if own is not None else list(self.script)
        self._running[request_id] = (script, ids[-1], list(own) if own is not None else None)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._running)

    def step(self) -> list[StepOutput]:
        self.most_at_once = max(self.most_at_once, len(self._running))
        outputs = []
        for request_id, (script, last, own) in list(self._running.items()):
            drafted, accepted = script.pop(0)
            self.stats.spec.add(drafted, accepted)
            tokens = [own.pop(0)] if own is not None else list(range(last + 1, last + accepted + 2))
            self._running[request_id] = (script, tokens[-1], own)
            mask = [True] * accepted + [False]
            outputs.append(StepOutput(request_id, tokens, mask, not script, None if script else "stop"))
            if not script:
                del self._running[request_id]
        return outputs
