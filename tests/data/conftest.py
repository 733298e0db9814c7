"""A tiny tokenizer with a chat template, and an engine that answers from a script instead of a model."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from peagle.data.chat_format import ChatFormat
from peagle.engine.sampling_params import SamplingParams

TEMPLATE = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|start|>system\nBe kind.<|end|>\n{% endif %}"
    "{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIALS = ["<|pad|>", "<|start|>", "<|end|>"]
END = 2
STORY = (
    "Compose an engaging travel blog post about a recent trip to the moon, highlighting low gravity experiences and "
    "must-see craters."
)
SUM = (
    "Mara has 12 baskets with 7 apples each. She sells 30 apples in the morning and twice as many in the afternoon. "
    "How many apples does she have left?"
)
STUB = (
    "from typing import List\n\n\ndef far_apart_elements(numbers: List[float], threshold: float) -> bool:\n"
    '    """ Check if in given list of numbers, any two are farther apart than the threshold.\n'
    "    >>> far_apart_elements([1.0, 2.0], 0.5)\n    True\n"
    '    """\n'
)
PRIME = (
    'def is_prime(n):\n    """Return true if a given number is prime, and false otherwise.\n'
    '    >>> is_prime(6)\n    False\n    """\n'
)
FOLLOW_UP = "Can you parallelize it?"


def make_tokenizer(extra: tuple[str, ...] = (), template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a byte, after the special tokens."""
    symbols = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *extra]
    vocab = {symbol: number for number, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>")
    wrapped.chat_template = template
    return wrapped


@dataclass
class Step:
    request_id: str
    new_token_ids: list[int]
    finished: bool
    finish_reason: str | None


@dataclass
class FakeEngine:
    """Gives each request the tokens of `reply(prompt_ids, params)`, three a step, to `batch` requests at once."""

    reply: Callable[[list[int], SamplingParams], list[int]]
    batch: int = 4
    seen: list[tuple[list[int], SamplingParams]] = field(default_factory=list)
    most_waiting: int = 0
    stop_after: int | None = None
    _running: dict[str, tuple[list[int], SamplingParams, int]] = field(default_factory=dict)

    def add_request(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> Any:
        self.seen.append((list(prompt_token_ids), params))
        self._running[request_id] = (self.reply(list(prompt_token_ids), params)[: params.max_tokens], params, 0)
        self.most_waiting = max(self.most_waiting, len(self._running))

    def abort(self, request_id: str) -> bool:
        return self._running.pop(request_id, None) is not None

    def step(self) -> list[Step]:
        if self.stop_after is not None:
            self.stop_after -= 1
            if self.stop_after < 0:
                raise KeyboardInterrupt
        steps = []
        for request_id in list(self._running)[: self.batch]:
            tokens, params, at = self._running[request_id]
            new = tokens[at : at + 3]
            done = at + len(new) >= len(tokens)
            ended = done and bool(tokens) and tokens[-1] in (END, *(params.stop_token_ids or ()))
            steps.append(Step(request_id, new, done, ("stop" if ended else "length") if done else None))
            if done:
                del self._running[request_id]
            else:
                self._running[request_id] = (tokens, params, at + len(new))
        return steps


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def chat(tokenizer: PreTrainedTokenizerFast) -> ChatFormat:
    return ChatFormat(tokenizer, [END])


@pytest.fixture
def eval_files(tmp_path: Path) -> list[str]:
    """Evaluation files with the prompts above, in three forms."""
    (tmp_path / "mt.jsonl").write_text(json.dumps({"turns": [STORY, FOLLOW_UP]}) + "\n")
    (tmp_path / "maths.jsonl").write_text(json.dumps({"question": SUM, "answer": "#### -6"}) + "\n")
    (tmp_path / "code.jsonl").write_text(json.dumps({"prompt": STUB}) + "\n" + json.dumps({"prompt": PRIME}) + "\n")
    return [str(tmp_path / name) for name in ("mt.jsonl", "maths.jsonl", "code.jsonl")]
