"""A head and the target that it was made for, or another."""

import pytest

from peagle.drafter import check_fits
from peagle.errors import InputError
from tests.drafter.heads import (
    HIDDEN,
    VOCAB,
    make_config,
)


def test_a_head_that_fits():
    check_fits(make_config(), vocab_size=VOCAB, hidden_size=HIDDEN, num_layers=6)
    own = make_config(hidden_size=16, target_hidden_size=HIDDEN, own_embed_tokens=True, own_lm_head=True)
    check_fits(own, vocab_size=VOCAB, hidden_size=HIDDEN, num_layers=6)


@pytest.mark.parametrize(
    ("config", "target", "match"),
    [
        ({}, {"hidden_size": 64}, "target_hidden_size 32, but the target's is 64"),
        ({}, {"vocab_size": 61}, "vocab_size 60, but the target's is 61"),
        ({}, {"num_layers": 5}, r"eagle_aux_hidden_state_layer_ids \[2, 3, 5\], but the target has 5 layers"),
        (
            {"hidden_size": 16, "target_hidden_size": 32, "own_lm_head": True},
            {},
            "hidden_size 16 differs from the target's 32, so it cannot share",
        ),
    ],
)
def test_a_head_for_another_target(config, target, match):
    facts = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_layers": 6} | target
    with pytest.raises(InputError, match=match):
        check_fits(make_config(**config), **facts)
