import pytest

from peagle.data.dataset import open_dataset
from peagle.data.metadata import tokenizer_fingerprint
from peagle.errors import InputError
from tests.data.conftest import make_tokenizer


def test_tokenizer_fingerprint_ignores_special_token_settings(tokenizer):
    other = make_tokenizer()
    other.pad_token = "<|start|>"
    assert tokenizer_fingerprint(other) == tokenizer_fingerprint(tokenizer)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("{}", "format_version is None, expected 1"),
        ('{"format_version": 1}', r"target\.name is missing"),
    ],
)
def test_broken_metadata(tmp_path, text, message):
    (tmp_path / "dataset.json").write_text(text)
    with pytest.raises(InputError, match=message):
        open_dataset(tmp_path)
