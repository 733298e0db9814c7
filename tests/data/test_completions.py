import pytest

from peagle.data.completions import AnswerTokens, InexactAnswer, Received, exact_tokens, request_body, retokenise
from peagle.data.request_queue import EndpointError
from peagle.engine.sampling_params import SamplingParams
from peagle.errors import InputError
from tests.data.conftest import END, make_tokenizer

PROMPT = [70, 71, 72]
PARAMS = SamplingParams(max_tokens=10, temperature=0.0, seed=3)


@pytest.fixture
def answer(tokenizer):
    return AnswerTokens(tokenizer, 300, frozenset([END]), END)


def test_a_servers_own_defaults_change_nothing():
    body = request_body("m", PROMPT, PARAMS, True)
    assert body["prompt"] == PROMPT
    assert (body["top_k"], body["top_p"], body["repetition_penalty"], body["temperature"]) == (-1, 1.0, 1.0, 0.0)
    assert body["return_token_ids"]
    assert "seed" not in body, "greedy needs none"
    assert request_body("m", PROMPT, SamplingParams(temperature=0.7, seed=3), True)["seed"] == 3
    assert request_body("m", PROMPT, SamplingParams(top_k=5, stop_token_ids=[4]), True)["stop_token_ids"] == [4]
    plain = request_body("m", PROMPT, PARAMS, False)
    assert not plain.keys() & {"top_k", "repetition_penalty", "return_token_ids", "skip_special_tokens"}
    with pytest.raises(InputError, match="--top-k 5"):
        request_body("m", PROMPT, SamplingParams(top_k=5), False)


@pytest.mark.parametrize(
    ("received", "expected"),
    [
        (Received("", [70, END], "stop", None, 3, 2), ([70, END], "stop")),
        (Received("", [70], "stop", None, 3, 1), ([70, END], "stop")),  # the end token left out
        (Received("", [70], "length", None, 3, 1), ([70], "length")),
        (Received("", [70], "stop", 5, 3, 1), ([70, 5], "stop")),  # ended by another token, which is told
        (Received("", [70, 71], "loop"), ([70, 71], "loop")),
        (Received("ab", None, "stop", None, 3, None), (["a", "b", END], "stop")),
        (Received("ab", None, "stop", None, 3, 3), (["a", "b", END], "stop")),
        (Received("ab", None, "length", None, 3, 2), (["a", "b"], "length")),
        (Received("", None, "stop", None, 3, 1), ([END], "stop")),
    ],
)
def test_token_ids(tokenizer, answer, received, expected):
    ids = [tokenizer.encode(token)[0] if isinstance(token, str) else token for token in expected[0]]
    assert exact_tokens(received, PROMPT, PARAMS, answer) == (ids, expected[1])


@pytest.mark.parametrize(
    ("received", "message"),
    [
        (Received("", [70, 71], "length", None, 3, 3), "counts 3 tokens, its answer comes to 2"),
        (Received("ab", None, "stop", None, 3, 1), "counts 1 tokens, its answer comes to 3"),
        (Received("ab", None, "length", None, 3, 1), "counts 1 tokens, its answer comes to 2"),
    ],
)
def test_answers_whose_tokens_are_not_all_known(answer, received, message):
    with pytest.raises(InexactAnswer, match=message):
        exact_tokens(received, PROMPT, PARAMS, answer)


def test_an_unknown_end_token(tokenizer):
    unknown = AnswerTokens(tokenizer, 300, frozenset([END, 1]), None)
    assert exact_tokens(Received("", [70, 1], "stop"), PROMPT, PARAMS, unknown) == ([70, 1], "stop")
    with pytest.raises(InexactAnswer, match="the token that ended it is not told"):
        exact_tokens(Received("a", None, "stop"), PROMPT, PARAMS, unknown)


def test_ids_outside_the_vocabulary(answer):
    with pytest.raises(EndpointError, match="token id 300, outside"):
        exact_tokens(Received("", [300], "length"), PROMPT, PARAMS, answer)


def test_a_text_is_encoded_behind_its_prompt(tokenizer):
    prompt = tokenizer.encode("Sag: ")
    assert retokenise(tokenizer, prompt, "grüß 🙂") == tokenizer.encode("grüß 🙂")
    assert retokenise(tokenizer, prompt, "a\ufffdb") == tokenizer.encode("a\ufffdb")


class Lower:
    """A tokenizer that does not give every text back."""

    def __init__(self):
        self.inner = make_tokenizer()

    def encode(self, text, **kwargs):
        return self.inner.encode(text.lower(), **kwargs)

    def decode(self, ids, **kwargs):
        return self.inner.decode(ids, **kwargs)


def test_a_text_that_does_not_come_back():
    prompt = Lower().encode("say ")
    assert retokenise(Lower(), prompt, "yes") is not None
    assert retokenise(Lower(), prompt, "Yes") is None
    answer = AnswerTokens(Lower(), 300, frozenset([END]), END)
    with pytest.raises(InexactAnswer, match="does not come out of its own tokens"):
        exact_tokens(Received("Yes", None, "stop"), prompt, PARAMS, answer)
