"""The network against a plain implementation written here from docs/method.md, row by row and head by head."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from tests.drafter.heads import HIDDEN, VOCAB, causal_attend, make_drafter, make_target_tensors


def rms(x, weight, eps):
    return [value / math.sqrt(sum(v * v for v in x) / len(x) + eps) * w for value, w in zip(x, weight, strict=True)]


def matvec(weight, x):
    return [sum(w * value for w, value in zip(row, x, strict=True)) for row in weight]


def rotate(head, position, theta):
    half = len(head) // 2
    out = [0.0] * len(head)
    for i in range(half):
        angle = position * theta ** (-i / half)
        out[i] = head[i] * math.cos(angle) - head[i + half] * math.sin(angle)
        out[i + half] = head[i + half] * math.cos(angle) + head[i] * math.sin(angle)
    return out


def plain_forward(state, config, embeds, hidden, positions, mask):
    """Lists of Python floats all the way: nothing in common with the module but the weights."""
    heads, kv_heads, dim, eps = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.rms_norm_eps,
    )
    rows = range(len(positions))
    current = hidden
    for layer in range(config.num_hidden_layers):
        w = {k.removeprefix(f"layers.{layer}."): v for k, v in state.items() if k.startswith(f"layers.{layer}.")}
        inputs, residual = [], []
        for t in rows:
            if layer == 0:
                normed = rms(current[t], w["hidden_norm.weight"], eps)
                inputs.append(rms(embeds[t], w["input_layernorm.weight"], eps) + normed)
                residual.append(normed if config.norm_before_residual else current[t])
            else:
                inputs.append(rms(current[t], w["input_layernorm.weight"], eps))
                residual.append(current[t])
        q, k, v = ([matvec(w[f"self_attn.{name}_proj.weight"], x) for x in inputs] for name in "qkv")

        def split(x, n):
            return [x[i * dim : (i + 1) * dim] for i in range(n)]

        theta = config.rope_parameters["rope_theta"]
        q = [[rotate(h, positions[t], theta) for h in split(q[t], heads)] for t in rows]
        k = [[rotate(h, positions[t], theta) for h in split(k[t], kv_heads)] for t in rows]
        v = [split(v[t], kv_heads) for t in rows]
        following = []
        for t in rows:
            joined = []
            for h in range(heads):
                g = h // (heads // kv_heads)
                seen = [s for s in rows if mask[t][s]]
                scores = [sum(a * b for a, b in zip(q[t][h], k[s][g], strict=True)) / math.sqrt(dim) for s in seen]
                top = max(scores)
                weights = [math.exp(score - top) for score in scores]
                total = sum(weights)
                joined += [
                    sum(weight / total * v[s][g][i] for weight, s in zip(weights, seen, strict=True))
                    for i in range(dim)
                ]
            attended = matvec(w["self_attn.o_proj.weight"], joined)
            after = [a + b for a, b in zip(residual[t], attended, strict=True)]
            x = rms(after, w["post_attention_layernorm.weight"], eps)
            gate, up = matvec(w["mlp.gate_proj.weight"], x), matvec(w["mlp.up_proj.weight"], x)
            inner = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
            following.append([a + b for a, b in zip(after, matvec(w["mlp.down_proj.weight"], inner), strict=True)])
        current = following
    return [rms(x, state["norm.weight"], eps) for x in current], current


@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
def test_forward_equals_plain_arithmetic(layers, norm_before_residual):
    drafter = make_drafter(num_hidden_layers=layers, norm_before_residual=norm_before_residual)
    # five NTP rows at anchors 3..7, then two MTP rows of the last anchor and one of anchor 5, out of order
    positions = [3, 4, 5, 6, 7, 8, 9, 6]
    anchors, depths = [3, 4, 5, 6, 7, 7, 7, 5], [0, 0, 0, 0, 0, 1, 2, 1]
    mask = [
        [
            (depths[s] == 0 and anchors[s] <= anchors[t]) or (anchors[s] == anchors[t] and 1 <= depths[s] <= depths[t])
            for s in range(8)
        ]
        for t in range(8)
    ]
    embeds, hidden = torch.randn(8, HIDDEN), torch.randn(8, HIDDEN)
    with torch.no_grad():
        normed, feedback = drafter(embeds, hidden, torch.tensor(positions), causal_attend(torch.tensor(mask)))
    state = {name: tensor.tolist() for name, tensor in drafter.state_dict().items()}
    expected = plain_forward(state, drafter.config, embeds.tolist(), hidden.tolist(), positions, mask)
    torch.testing.assert_close(normed, torch.tensor(expected[0]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(feedback, torch.tensor(expected[1]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("settings", [{"norm_before_residual": False}, {"norm_before_residual": True}, {"layers": 3}])
def test_rows_that_are_alike_need_be_there_once(settings):
    drafter = make_drafter(num_hidden_layers=settings.pop("layers", 2), attention_bias=True, **settings).double()
    rows, different = 9, 4
    mask = causal_attend(torch.ones(rows, rows).tril().bool())
    embeds, hidden = torch.randn(2, different + 1, HIDDEN, dtype=torch.float64)
    weight = torch.randn(2, rows, HIDDEN, dtype=torch.float64)

    def gradients(spread):
        inputs = [x.clone().requires_grad_() for x in (embeds, hidden)]
        whole = [torch.cat((x, x[-1:].expand(rows - different - 1, -1))) if spread else x for x in inputs]
        outs = drafter(*whole, torch.arange(3, 3 + rows), mask)
        drafter.zero_grad()
        sum((out * w).sum() for out, w in zip(outs, weight, strict=True)).backward()
        return [*outs, *(x.grad for x in inputs), *(p.grad.clone() for p in drafter.parameters() if p.grad is not None)]

    for once, each in zip(gradients(False), gradients(True), strict=True):
        torch.testing.assert_close(once, each, rtol=1e-10, atol=1e-10)


def test_a_layer_whose_output_nobody_reads_is_not_computed():
    drafter = make_drafter(num_hidden_layers=2)
    seen = []

    def keys_only(layer, q, k, v):
        seen.append((layer, k.shape[0], v.shape[0]))
        return q if layer == 0 else None

    drafter.layers[1].mlp = None
    drafter(torch.randn(3, HIDDEN), torch.randn(3, HIDDEN), torch.arange(3), keys_only)
    assert seen == [(0, 3, 3), (1, 3, 3)]


def test_later_layers_are_transformers_llama_layers():
    drafter = make_drafter(num_hidden_layers=3, max_position_embeddings=64)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        attn_implementation="eager",
    )
    layer = LlamaDecoderLayer(config, 0)
    layer.load_state_dict(drafter.layers[2].state_dict())
    x, positions = torch.randn(9, HIDDEN), torch.arange(9)
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    with torch.no_grad():
        cos, sin = LlamaRotaryEmbedding(config)(x[None], positions[None])
        additive = torch.zeros(1, 1, 9, 9).masked_fill(~mask, float("-inf"))
        expected = layer(x[None], attention_mask=additive, position_embeddings=(cos, sin))[0]
        got = drafter.layers[2](x, x, cos[0, :, None], sin[0, :, None], causal_attend(mask))
    torch.testing.assert_close(got, expected.view(9, HIDDEN), rtol=1e-5, atol=1e-5)


def test_feedback_is_normed_on_request():
    drafter = make_drafter(kind="eagle3", norm_output=True)
    rows = torch.randn(2, HIDDEN)
    normed, feedback = drafter(rows, rows, torch.arange(2), causal_attend(torch.ones(2, 2, dtype=torch.bool).tril()))
    assert feedback is normed
    plain = make_drafter(kind="eagle3")
    normed, feedback = plain(rows, rows, torch.arange(2), causal_attend(torch.ones(2, 2, dtype=torch.bool).tril()))
    torch.testing.assert_close(plain.norm(feedback), normed)


@pytest.mark.parametrize("option", [{}, {"norm_before_fc": True}, {"fc_norm": True}])
def test_mask_hidden_passes_the_norms_and_fc(option):
    drafter = make_drafter(**option)
    aux = torch.randn(4, 3 * HIDDEN)
    aux[2] = drafter.mask_hidden.view(-1)
    combined = drafter.combine(aux)
    torch.testing.assert_close(drafter.mask_state(), combined[2])
    if option.get("norm_before_fc"):
        normed = torch.nn.functional.rms_norm(aux, (96,), drafter.input_norm.weight, 1e-5)
    elif option.get("fc_norm"):
        parts = zip(aux.chunk(3, dim=-1), drafter.fc_norm, strict=True)
        normed = torch.cat([torch.nn.functional.rms_norm(x, (HIDDEN,), n.weight, 1e-5) for x, n in parts], dim=-1)
    else:
        normed = aux
    torch.testing.assert_close(combined, normed @ drafter.fc.weight.T, rtol=1e-4, atol=1e-4)


def test_mask_state_has_a_gradient_for_mask_hidden_and_fc():
    drafter = make_drafter()
    drafter.mask_state().sum().backward()
    assert drafter.mask_hidden.grad.abs().sum() > 0
    assert drafter.fc.weight.grad.abs().sum() > 0


# --- embeddings, LM head, reduced vocabulary -------------------------------------------------------------------------


def test_shared_weights_are_the_targets_and_no_parameters():
    drafter = make_drafter()
    names = set(drafter.state_dict())
    assert not drafter.bound
    embed, head = make_target_tensors()
    drafter.bind(embed, head)
    assert drafter.bound
    assert drafter.embed_weight().data_ptr() == embed.data_ptr()
    assert drafter.lm_head_weight().data_ptr() == head.data_ptr()
    assert set(drafter.state_dict()) == names
    ids, rows = torch.tensor([0, 5, 59]), torch.randn(3, HIDDEN)
    torch.testing.assert_close(drafter.embed(ids), embed[ids])
    torch.testing.assert_close(drafter.logits(rows), rows @ head.T, rtol=1e-4, atol=1e-4)


def test_own_weights_are_kept_when_a_target_is_bound():
    drafter = make_drafter(own_embed_tokens=True, own_lm_head=True)
    assert drafter.bound
    drafter.bind(*make_target_tensors())
    assert drafter.embed_weight() is drafter.embed_tokens.weight
    assert drafter.lm_head_weight() is drafter.lm_head.weight
    assert {"embed_tokens.weight", "lm_head.weight"} <= set(drafter.state_dict())


def test_reduced_vocabulary_without_lm_head_takes_the_targets_rows():
    drafter = make_drafter(draft_vocab_size=20)
    embed, head = make_target_tensors()
    drafter.bind(embed, head)
    ids = drafter.to_target_ids(torch.arange(20))
    assert len(set(ids.tolist())) == 20
    assert int(ids.max()) < VOCAB
    torch.testing.assert_close(drafter.lm_head_weight(), head[ids])
    rows = torch.randn(4, HIDDEN)
    full = rows @ head.T
    torch.testing.assert_close(drafter.logits(rows), full[:, ids], rtol=1e-4, atol=1e-4)
    best = drafter.to_target_ids(drafter.logits(rows).argmax(-1))
    outside = torch.ones(VOCAB, dtype=torch.bool)
    outside[ids] = False
    assert torch.equal(best, full.masked_fill(outside, float("-inf")).argmax(-1))


def test_whole_vocabulary_ids_are_the_targets():
    drafter = make_drafter()
    ids = torch.tensor([3, 0, 59])
    assert drafter.d2t is None
    assert torch.equal(drafter.to_target_ids(ids), ids)


def test_eagle3_has_no_mask_hidden():
    drafter = make_drafter(kind="eagle3")
    assert drafter.mask_hidden is None
    assert "mask_hidden" not in drafter.state_dict()


# --- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotary_frequencies_stay_float32(dtype):
    """Rounded to bfloat16 they would be whole turns off at the positions of long answers."""
    drafter = make_drafter()
    before = drafter.rotary.inv_freq.clone()
    low = drafter.to(dtype)
    assert low.fc.weight.dtype == dtype
    assert low.rotary.inv_freq.dtype == torch.float32
    assert torch.equal(low.rotary.inv_freq, before)


def test_float64_works():
    drafter = make_drafter().double()
    rows = torch.randn(2, HIDDEN, dtype=torch.float64)
    normed, _ = drafter(rows, rows, torch.arange(2), causal_attend(torch.ones(2, 2, dtype=torch.bool).tril()))
    assert normed.dtype == torch.float64


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 500000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
        {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_rope_types_are_transformers(rope):
    """Scores depend on the distance only, and frequencies and scale are the library's."""
    drafter = make_drafter(rope_parameters=rope)
    reference = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=HIDDEN, num_attention_heads=4, head_dim=8, max_position_embeddings=512, rope_parameters=rope
        )
    )
    assert torch.equal(drafter.rotary.inv_freq, reference.inv_freq)
    assert drafter.rotary.attention_scaling == reference.attention_scaling
    rows = torch.randn(5, HIDDEN)
    mask = causal_attend(torch.ones(5, 5, dtype=torch.bool).tril())
    with torch.no_grad():
        near, _ = drafter(rows, rows, torch.arange(5), mask)
        far, _ = drafter(rows, rows, torch.arange(5) + 300, mask)
    torch.testing.assert_close(near, far, rtol=1e-3, atol=1e-3)
