"""How one request wants its tokens chosen and when it stops; names and meaning are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from peagle.errors import InputError

# Below this a temperature means greedy, as in vLLM: dividing logits by less overflows.
GREEDY_BELOW = 1e-5
MAX_SEED = 2**63 - 1
MAX_BIAS = 100.0  # a logit_bias beyond this is cut to it, as in vLLM


def _integer(name: str, value: object, expected: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name}: got {value!r}, expected {expected}")
    return value


def _number(name: str, value: object, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise InputError(f"{name}: got {value!r}, expected {expected}")
    return float(value)


def _checked_bias(bias: object) -> dict[int, float]:
    """Token ids (in JSON they are strings) -> finite numbers, cut to what vLLM allows."""
    expected = "token ids of 0 or more with finite numbers"
    if not isinstance(bias, Mapping):
        raise InputError(f"logit_bias: got {bias!r}, expected {expected}")
    checked: dict[int, float] = {}
    for key, value in bias.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        number = _number("logit_bias", value, expected)
        if _integer("logit_bias", token, expected) < 0 or abs(number) == float("inf"):
            raise InputError(f"logit_bias: got {{{key!r}: {value!r}}}, expected {expected}")
        checked[token] = min(max(number, -MAX_BIAS), MAX_BIAS)
    return checked


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request.

    max_tokens None means up to the model's length. temperature 0 is greedy. top_k 0 or -1 takes all tokens. A stop
    string ends the text before it; stop_token_ids and the end-of-sequence tokens stay in `token_ids` but are not text.
    min_tokens holds back end-of-sequence, stop_token_ids and the ends of stop strings until so many tokens are there.
    seed makes a request's tokens depend on its own prompt only. num_speculative_tokens (not in vLLM) lowers the
    engine's K for this request, 0 turns drafting off.

    min_p: after temperature, tokens less likely than min_p times the likeliest are left out. logit_bias: token id ->
    what is added to its logit. repetition_penalty divides positive and multiplies negative logits of tokens of prompt
    and output; frequency_penalty is subtracted once for every time that a token stands in the output,
    presence_penalty once for having occurred there. logprobs n: the n likeliest tokens of the model's own distribution
    (before bias, penalties and temperature) and the one that was chosen, for every output token; prompt_logprobs the
    same for the prompt's; -1 takes the whole vocabulary. n: how many completions (see `completions`).
    Raises InputError naming the field.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    min_tokens: int = 0
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    num_speculative_tokens: int | None = None
    n: int = 1
    min_p: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and _integer("max_tokens", self.max_tokens, "a positive integer or None") < 1:
            raise InputError(f"max_tokens: got {self.max_tokens}, expected a positive integer or None")
        temperature = _number("temperature", self.temperature, "a number of 0 or more")
        if not 0 <= temperature < float("inf"):
            raise InputError(f"temperature: got {self.temperature}, expected a finite number of 0 or more")
        if _integer("top_k", self.top_k, "0 or -1 (off) or a positive integer") < -1:
            raise InputError(f"top_k: got {self.top_k}, expected 0 or -1 (off) or a positive integer")
        if not 0 < _number("top_p", self.top_p, "a number above 0 and at most 1") <= 1:
            raise InputError(f"top_p: got {self.top_p}, expected a number above 0 and at most 1")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if not all(isinstance(text, str) and text for text in stop):
            raise InputError(f"stop: got {self.stop!r}, expected strings of at least one character")
        object.__setattr__(self, "stop", stop)
        ids = tuple(_integer("stop_token_ids", i, "token ids") for i in self.stop_token_ids or ())
        if any(i < 0 for i in ids):
            raise InputError(f"stop_token_ids: got {list(ids)}, expected ids of 0 or more")
        object.__setattr__(self, "stop_token_ids", ids)
        if self.seed is not None and not 0 <= _integer("seed", self.seed, "an integer of 0 or more") <= MAX_SEED:
            raise InputError(f"seed: got {self.seed}, expected 0 to {MAX_SEED}")
        if _integer("min_tokens", self.min_tokens, "an integer of 0 or more") < 0:
            raise InputError(f"min_tokens: got {self.min_tokens}, expected an integer of 0 or more")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InputError(f"min_tokens: got {self.min_tokens}, expected at most max_tokens ({self.max_tokens})")
        k = self.num_speculative_tokens
        if k is not None and _integer("num_speculative_tokens", k, "an integer of 0 or more") < 0:
            raise InputError(f"num_speculative_tokens: got {k}, expected an integer of 0 or more")
        if _integer("n", self.n, "a positive integer") < 1:
            raise InputError(f"n: got {self.n}, expected a positive integer")
        if not 0 <= _number("min_p", self.min_p, "a number from 0 to 1") <= 1:
            raise InputError(f"min_p: got {self.min_p}, expected a number from 0 to 1")
        if not 0 < _number("repetition_penalty", self.repetition_penalty, "a finite number above 0") < float("inf"):
            raise InputError(f"repetition_penalty: got {self.repetition_penalty}, expected a finite number above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= _number(name, getattr(self, name), "a number from -2 to 2") <= 2:
                raise InputError(f"{name}: got {getattr(self, name)}, expected a number from -2 to 2")
        for name in ("logprobs", "prompt_logprobs"):
            count, expected = getattr(self, name), "-1 (all), an integer of 0 or more, or None"
            if count is not None and _integer(name, count, expected) < -1:
                raise InputError(f"{name}: got {count}, expected {expected}")
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))

    def completions(self) -> list[SamplingParams]:
        """The parameters of the n completions, each a request of its own with n = 1.

        With a seed the i-th takes seed + i, as in vLLM (modulo 2**63); without one each gets its own from the engine.
        Only the first reports prompt_logprobs, which are the same for all.
        """
        return [
            replace(
                self,
                n=1,
                seed=None if self.seed is None else (self.seed + i) % (MAX_SEED + 1),
                prompt_logprobs=self.prompt_logprobs if i == 0 else None,
            )
            for i in range(self.n)
        ]

    @property
    def penalised(self) -> bool:
        """Whether the choice of a token depends on those before it otherwise than through the model."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return self.stop  # type: ignore[return-value]  # normalised above
