"""What a head's config refuses, with the key and both values named."""

import pytest

from peagle.drafter.config import with_aux_layers
from peagle.errors import InputError
from tests.drafter.heads import make_config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "medusa"}, "kind: got 'medusa', expected one of p-eagle, eagle3"),
        ({"hidden_size": 0}, "hidden_size: got 0, expected a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: got 0"),
        ({"max_position_embeddings": -1}, "max_position_embeddings: got -1"),
        ({"num_aux_hidden_states": -1, "aux_hidden_state_layer_ids": ()}, "num_aux_hidden_states: got -1"),
        ({"num_attention_heads": 5}, r"num_attention_heads: got 5, expected a multiple of num_key_value_heads \(2\)"),
        ({"draft_vocab_size": 61}, "draft_vocab_size: got 61, expected 1 to 60"),
        ({"draft_vocab_size": -3}, "draft_vocab_size: got -3, expected 1 to 60"),
        ({"aux_hidden_state_layer_ids": (-1, 2, 3)}, r"eagle_aux_hidden_state_layer_ids: got \[-1, 2, 3\]"),
        ({"aux_hidden_state_layer_ids": (2, 2, 1)}, r"got \[2, 2, 1\], expected the ids .*ascending, each once"),
        ({"aux_hidden_state_layer_ids": (5, 3, 2)}, r"got \[5, 3, 2\], expected the ids .*ascending"),
        ({"mask_token_id": None}, "ptd_token_id: missing, expected the id of the mask token"),
        ({"mask_token_id": 60}, "ptd_token_id: got 60, expected 0 to 59"),
        ({"mask_token_id": -1}, "ptd_token_id: got -1, expected 0 to 59"),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc, fc_norm: both are set"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(InputError, match=message):
        make_config(**changes)


def test_defaults_follow_other_fields():
    config = make_config()
    assert config.draft_vocab_size == config.vocab_size
    assert not config.reduced_vocab
    assert config.target_hidden_size == config.hidden_size
    assert config.aux_size == 96
    other = make_config(target_hidden_size=48, draft_vocab_size=10, aux_hidden_state_layer_ids=[1, 4])
    assert other.aux_size == 96
    assert other.reduced_vocab
    assert other.aux_hidden_state_layer_ids == (1, 4)


def test_eagle3_needs_no_mask_token():
    assert make_config(kind="eagle3").mask_token_id is None


def test_auxiliary_layers_that_a_checkpoint_does_not_name():
    """vLLM's default, and it is said; what has no default is refused."""
    unsaid = make_config(aux_hidden_state_layer_ids=())
    assert unsaid.aux_size == 96
    config, remark = with_aux_layers(unsaid, 24)
    assert config.aux_hidden_state_layer_ids == (2, 12, 21)
    assert "[2, 12, 21] are taken as in vLLM" in remark
    named = make_config()
    assert with_aux_layers(named, 24) == (named, "")
    for config, layers in ((unsaid, 5), (make_config(aux_hidden_state_layer_ids=(), num_aux_hidden_states=5), 24)):
        with pytest.raises(InputError, match="eagle_aux_hidden_state_layer_ids: missing, and there is no default"):
            with_aux_layers(config, layers)
