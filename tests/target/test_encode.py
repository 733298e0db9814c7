"""Auxiliary states and LM head against Transformers' own, index by index, on every architecture."""

import pytest
import torch

from peagle.errors import InputError
from peagle.target.model import Target


def tokens(length, seed=0, batch=1):
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def reference(any_target):
    ids = tokens(30)
    with torch.no_grad():
        return any_target, ids, any_target.model(ids, output_hidden_states=True, use_cache=False)


def test_every_layer_id_is_transformers_hidden_state(reference):
    target, ids, out = reference
    for layer in range(target.num_layers):
        states = target.encode(ids, (layer,))
        torch.testing.assert_close(states.aux, out.hidden_states[layer], rtol=1e-5, atol=1e-5)


def test_ids_are_concatenated_in_the_order_given(reference):
    target, ids, out = reference
    for order in ((1, 3, 6), (5, 0, 2)):
        expected = torch.cat([out.hidden_states[i] for i in order], dim=-1)
        torch.testing.assert_close(target.encode(ids, order).aux, expected, rtol=1e-5, atol=1e-5)


def test_hidden_is_what_the_lm_head_reads(reference):
    target, ids, out = reference
    states = target.encode(ids, (2,))
    torch.testing.assert_close(states.hidden, out.hidden_states[-1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(target.lm_logits(states.hidden), out.logits, rtol=1e-5, atol=1e-4)


def test_padding_on_the_right_changes_nothing(any_target):
    ids = tokens(30)
    alone = any_target.encode(ids[:, :17], (1, 3, 6))
    padded = any_target.encode(torch.cat((ids[:, :17], torch.full((1, 13), 258)), dim=1), (1, 3, 6))
    other = torch.cat((tokens(30, seed=1), torch.cat((ids[:, :17], torch.full((1, 13), 258)), dim=1)))
    batched = any_target.encode(other, (1, 3, 6))
    for rows in (padded.aux[:, :17], batched.aux[1:, :17]):
        torch.testing.assert_close(rows, alone.aux, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(batched.hidden[1:, :17], alone.hidden, rtol=1e-4, atol=1e-4)


def test_nothing_needs_gradients_and_nothing_is_kept(any_target):
    states = any_target.encode(tokens(5), (1, 2, 3))
    assert not states.aux.requires_grad
    assert not any(p.requires_grad for p in any_target.model.parameters())
    assert not any_target._captured


def test_soft_caps_are_active(tiny_target):
    """Guards the comparisons above and below: they would pass without these caps if the caps did nothing."""
    for name in ("gemma2", "gemma3"):
        target = tiny_target(name)
        hidden = target.encode(tokens(30), (6,)).hidden
        assert target.lm_logits(20 * hidden).abs().max() <= 5.0
        assert torch.nn.functional.linear(hidden, target.lm_head_weight).abs().max() > 10.0


def test_soft_cap_of_attention_reaches_the_dense_forward(tiny_target):
    """Gemma 2 caps its attention scores, which PyTorch's fused attention cannot; training must see them capped."""
    target = tiny_target("gemma2")
    capped = target.encode(tokens(30), (6,)).aux
    attentions = [layer.self_attn for layer in target.layers]
    try:
        for attention in attentions:
            attention.attn_logit_softcapping = None
        uncapped = target.encode(tokens(30), (6,)).aux
    finally:
        for attention in attentions:
            attention.attn_logit_softcapping = 2.0
    assert (uncapped - capped).abs().max() > 1e-2


def test_a_drafter_sees_the_raw_embedding_rows(any_target):
    """Gemma scales its embeddings after the lookup; a head that shares them reads the rows as they are stored.

    That is what vLLM gives a head too (it shares the module that looks up, not the function that scales).
    """
    rows = any_target.embed_weight[tokens(9)[0]]
    entering = any_target.encode(tokens(9), (0,)).aux[0]
    scale = any_target.hidden_size**0.5 if any_target.config.model_type.startswith("gemma") else 1.0
    torch.testing.assert_close(entering, rows * scale, rtol=1e-5, atol=1e-5)
    assert any_target.embed_weight.shape == (any_target.vocab_size, any_target.hidden_size)
    assert any_target.lm_head_weight.shape == (any_target.vocab_size, any_target.hidden_size)


def test_facts(any_target):
    assert any_target.num_layers == 7
    assert any_target.default_aux_layer_ids() == (2, 3, 4)
    assert any_target.max_model_len == 512
    assert any_target.vocab_size == 320
    assert any_target.head_dim == (16 if any_target.config.model_type == "gemma3_text" else 8)


@pytest.mark.parametrize("ids", [(1, 3, 7), (-1, 2, 3)])
def test_a_layer_that_does_not_exist_is_refused(any_target, ids):
    with pytest.raises(InputError, match=r"eagle_aux_hidden_state_layer_ids.*expected 0 to 6"):
        any_target.check_aux_layer_ids(ids)


def test_layer_zero_is_captured_alongside_others(tiny_target):
    target = tiny_target("llama")
    assert isinstance(target, Target)
    states = target.encode(tokens(4), (0, 6))
    assert states.aux.shape == (1, 4, 64)


def test_no_mask_is_made_where_causal_is_all_there_is(tiny_target, monkeypatch):
    # Transformers looks for packed sequences when it makes one, which waits for a GPU in every pass
    def looked(*_):
        raise AssertionError("looked for packed sequences")

    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", looked)
    target = tiny_target("llama")
    expected = target.encode(tokens(9), (2,)).aux
    monkeypatch.undo()
    assert target.model.config._attn_implementation == "sdpa"  # to others it is what it was
    torch.testing.assert_close(target.model(tokens(9), output_hidden_states=True).hidden_states[2], expected)
