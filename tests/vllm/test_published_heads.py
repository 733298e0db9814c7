"""The heads that AWS published (gpt-oss-20b, gpt-oss-120b, Qwen3-Coder-30B-A3B) and their targets.

Full size: every shape, without weights. Small: the same layout on tiny random targets of the same kinds, through
the engine and `peagle eval`. What the publications do not say (the drafter's own attention and MLP sizes) is set to the
target's attention and four times the hidden size; with those the 120B head has the 1.7B parameters of its model card.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import pytest
import torch
from transformers import GptOssConfig, Qwen3MoeConfig

from peagle.config import EngineConfig, SpeculativeConfig
from peagle.drafter import Drafter, load_drafter, save_drafter
from peagle.drafter.checkpoint import check_fits, parse_config, read_config
from peagle.drafter.config import DrafterConfig
from peagle.drafter.facts import expected_shapes, read_head_facts
from peagle.engine import Engine
from peagle.engine.loading import load_bound_drafter
from peagle.target.facts import target_facts
from peagle.vllm.needs import head_traits, target_problems
from peagle.vllm.versions import known_problems
from tests.cli.conftest import run_peagle
from tests.conftest import MASK
from tests.engine.helpers import SEQUENCES, assert_same, greedy, make_engine, replay, run

LAYERS = 4


@dataclass(frozen=True)
class Published:
    """A published head with its target's sizes."""

    name: str
    k_train: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    target_layers: int
    mask_token: int

    @property
    def aux(self) -> list[int]:
        return [2, self.target_layers // 2, self.target_layers - 3]

    def config_json(self) -> dict[str, object]:
        """config.json with the keys that those heads have, and none of this package's own."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": 4 * self.hidden,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "max_position_embeddings": 131072,
            "vocab_size": self.vocab,
            "draft_vocab_size": self.vocab,
            "eagle_aux_hidden_state_layer_ids": self.aux,
            "parallel_drafting": True,
            "ptd_token_id": self.mask_token,
            "torch_dtype": "bfloat16",
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensors as the files name them, written out by hand."""
        h, q, kv, mlp = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim, 4 * self.hidden
        shapes: dict[str, tuple[int, ...]] = {
            "embed_tokens.weight": (self.vocab, h),
            "lm_head.weight": (self.vocab, h),
            "fc.weight": (h, 3 * h),
            "mask_hidden": (1, 1, 3 * h),
            "norm.weight": (h,),
            "midlayer.hidden_norm.weight": (h,),
        }
        for layer, width in (("midlayer", 2 * h), *((f"layers.{i}", h) for i in range(1, LAYERS))):
            shapes |= {
                f"{layer}.self_attn.q_proj.weight": (q, width),
                f"{layer}.self_attn.k_proj.weight": (kv, width),
                f"{layer}.self_attn.v_proj.weight": (kv, width),
                f"{layer}.self_attn.o_proj.weight": (h, q),
                f"{layer}.mlp.gate_proj.weight": (mlp, h),
                f"{layer}.mlp.up_proj.weight": (mlp, h),
                f"{layer}.mlp.down_proj.weight": (h, mlp),
                f"{layer}.input_layernorm.weight": (h,),
                f"{layer}.post_attention_layernorm.weight": (h,),
            }
        return shapes


GPT_OSS = {"hidden": 2880, "heads": 64, "kv_heads": 8, "head_dim": 64, "vocab": 201088, "mask_token": 201020}
HEADS = {
    "gpt-oss-20b": Published("amazon/gpt-oss-20b-p-eagle", k_train=10, target_layers=24, **GPT_OSS),
    "gpt-oss-120b": Published("amazon/gpt-oss-120b-p-eagle", k_train=8, target_layers=36, **GPT_OSS),
    "qwen3-coder-30b": Published(
        "Qwen3-Coder-30B-A3B", 18, hidden=2048, heads=32, kv_heads=4, head_dim=128, vocab=151936, target_layers=48,
        mask_token=151930,
    ),
}  # fmt: skip


def target_config(name: str) -> GptOssConfig | Qwen3MoeConfig:
    head = HEADS[name]
    sizes = {
        "hidden_size": head.hidden,
        "num_hidden_layers": head.target_layers,
        "num_attention_heads": head.heads,
        "num_key_value_heads": head.kv_heads,
        "head_dim": head.head_dim,
        "vocab_size": head.vocab,
    }
    if name.startswith("gpt-oss"):
        return GptOssConfig(**sizes, max_position_embeddings=131072)
    return Qwen3MoeConfig(**sizes, max_position_embeddings=262144, num_experts=128, num_experts_per_tok=8)


def write_headers(folder: Path, head: Published) -> Path:
    """A folder with the head's config and a safetensors file of full size whose weights are a hole in the file."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(head.config_json()))
    header, end = {}, 0
    for name, shape in head.shapes().items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + 2 * prod(shape)]}
        end += 2 * prod(shape)
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


@pytest.mark.parametrize("name", HEADS)
def test_full_size_shapes(name, tmp_path):
    head = HEADS[name]
    facts = read_head_facts(write_headers(tmp_path / "head", head))
    assert facts.problems == []
    assert facts.config is not None
    config = facts.config
    assert (config.kind, config.num_hidden_layers, config.mask_token_id) == ("p-eagle", LAYERS, head.mask_token)
    assert config.own_embed_tokens
    assert config.own_lm_head
    by_module = {shape_name.replace("midlayer", "layers.0"): shape for shape_name, shape in head.shapes().items()}
    assert expected_shapes(config) == by_module
    if name == "gpt-oss-20b":
        assert by_module["mask_hidden"] == (1, 1, 8640)
    if name == "gpt-oss-120b":
        assert 1.65e9 < facts.num_parameters < 1.75e9
    target = target_facts(target_config(name))
    assert target_problems(facts, target) == []
    check_fits(config, **target.fits_arguments)
    other = target_facts(target_config("gpt-oss-20b" if name.startswith("qwen") else "qwen3-coder-30b"))
    assert len(target_problems(facts, other)) >= 2


@pytest.mark.parametrize("name", HEADS)
def test_full_size_forward_without_weights(name):
    """Rows go through the whole network at K_train depths, on the meta device."""
    head = HEADS[name]
    folder_config = replace(_parse(head), own_embed_tokens=True, own_lm_head=True)
    with torch.device("meta"):
        drafter = Drafter(folder_config).to(torch.bfloat16)
        rows = 2 * (1 + head.k_train)
        aux = torch.empty(rows, 3 * head.hidden, dtype=torch.bfloat16)
        positions = torch.arange(rows)
        seen = []

        def attend(layer, q, k, v):
            seen.append((layer, tuple(q.shape), tuple(k.shape), tuple(v.shape)))
            return torch.empty_like(q)

        hidden = drafter.combine(aux)
        assert drafter.mask_state().shape == (head.hidden,)
        normed, _ = drafter(drafter.embed(positions), hidden, positions, attend)
        assert drafter.logits(normed).shape == (rows, head.vocab)
    kv = (rows, head.kv_heads, head.head_dim)
    assert seen == [(layer, (rows, head.heads, head.head_dim), kv, kv) for layer in range(LAYERS)]


def _parse(head: Published) -> DrafterConfig:

    return parse_config(head.config_json())


def test_only_the_20b_needs_the_kv_group_fix(tmp_path):
    """12 + 4 full-attention layers against 12 with a window; 18 + 4 against 18 stay below the old threshold."""
    needing = []
    for name, head in HEADS.items():
        facts = read_head_facts(write_headers(tmp_path / name, head))
        traits = head_traits(facts, target_facts(target_config(name)))
        if any("36684" in p.instead for p in known_problems((0, 16), traits)):
            needing.append(name)
        assert not any("36684" in p.instead for p in known_problems((0, 25), traits))
    assert needing == ["gpt-oss-20b"]


@pytest.fixture(scope="module")
def small_head(tmp_path_factory, tiny_target):
    """small_head("gpt_oss") -> a folder with a random head of the published layout for the tiny target."""
    made: dict[str, Path] = {}

    def head(architecture: str) -> Path:
        if architecture not in made:
            target = tiny_target(architecture)
            small = Published("small", 10, target.hidden_size, 4, 2, 8, target.vocab_size, target.num_layers, MASK)
            config = replace(_parse(small), own_embed_tokens=True, own_lm_head=True, max_position_embeddings=512)
            torch.manual_seed(5)
            folder = tmp_path_factory.mktemp("small") / architecture
            save_drafter(Drafter(config), folder)
            (folder / "config.json").write_text(json.dumps(small.config_json() | {"max_position_embeddings": 512}))
            made[architecture] = folder
            facts = read_head_facts(folder)
            assert {n: t.shape for n, t in facts.tensors.items()} == small.shapes()
        return made[architecture]

    return head


@pytest.mark.parametrize("k", [3, 5, 10])
@pytest.mark.parametrize("architecture", ["gpt_oss", "qwen3_moe"])
def test_the_engine_changes_no_token(architecture, k, tiny_target, small_head):
    """Drafts that are right for 0 to K tokens, in turn, over contexts beyond the sliding window."""
    target = tiny_target(architecture)
    plain = [run(make_engine(target), [prompt], greedy(24))[0].output_token_ids for prompt in SEQUENCES]
    drafter = load_bound_drafter(target, SpeculativeConfig(str(small_head(architecture)), k, parallel_drafting=True))
    engine = Engine(target, drafter, k, EngineConfig(max_num_seqs=8, max_model_len=128))
    known = {str(i): prompt + answer for i, (prompt, answer) in enumerate(zip(SEQUENCES, plain, strict=True))}
    order = torch.randperm(4 * (k + 1), generator=torch.Generator().manual_seed(k)) % (k + 1)
    replay(engine, known, order.tolist())
    for prompt, answer, request in zip(SEQUENCES, plain, run(engine, SEQUENCES, greedy(24)), strict=True):
        assert_same(target, prompt, answer, request.output_token_ids)
    assert engine.stats.spec.num_accepted_tokens > 0


@pytest.mark.parametrize("architecture", ["gpt_oss", "qwen3_moe"])
def test_eval_and_inspect(architecture, target_folder, small_head, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text * 9}) + "\n" for text in ("abc ", "To be, ", "1 + ")))
    head, target = small_head(architecture), target_folder(architecture)
    result = run_peagle(
        "eval", target, head, "--prompts", prompts, "--k", "3,10", "--max-tokens", "16", "--device", "cpu", "--check"
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.count("all 3 answers equal plain decoding's") == 2
    result = run_peagle("inspect", head, "--target", target, "--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content["target"]["fits"]
    assert content["shares"] == []
    assert load_drafter(head, "p-eagle").config == replace(read_config(head), own_embed_tokens=True, own_lm_head=True)
