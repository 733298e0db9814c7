"""Writing a tiny Llama as a GGUF file, the way llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaForCausalLM

TENSORS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def _interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbouring pairs where Transformers rotates halves: reorder each head's rows."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def q8_0(weight: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    """A matrix in blocks of 32 integers with a float16 scale; its last dimension is a multiple of 32."""
    return gguf.quantize(weight, gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0


def write_llama(path: Path, model: LlamaForCausalLM, end_token: str = "<|end|>", quantised: bool = False) -> None:
    """A GGUF file with a byte-level tokenizer, its matrices in float32 or in Q8_0 and float16.

    `end_token` is what its metadata names as the end of text.
    """
    config = model.config

    def add(name: str, tensor: torch.Tensor) -> None:
        values = tensor.contiguous().numpy()
        if not quantised or values.ndim == 1:
            writer.add_tensor(name, values)
        elif values.shape[1] % 32:
            writer.add_tensor(name, values.astype(np.float16))
        else:
            blocks, kind = q8_0(values)
            writer.add_tensor(name, blocks, raw_dtype=kind)

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    tokens = [*sorted(ByteLevel.alphabet()), "<|start|>", "<|end|>", "<|pad|>", "th", "he"]
    tokens += [f"<|unused{i}|>" for i in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if "<|" in token else 1 for token in tokens])
    writer.add_token_merges(["t h", "h e"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(tokens.index(end_token))
    writer.add_pad_token_id(258)
    state = {name: tensor.float() for name, tensor in model.state_dict().items()}
    add("token_embd.weight", state["model.embed_tokens.weight"])
    add("output_norm.weight", state["model.norm.weight"])
    add("output.weight", state["lm_head.weight"])
    for layer in range(config.num_hidden_layers):
        for theirs, ours in TENSORS.items():
            tensor = state[f"model.layers.{layer}.{theirs}.weight"]
            if ours in ("attn_q", "attn_k"):
                heads = config.num_attention_heads if ours == "attn_q" else config.num_key_value_heads
                tensor = _interleave(tensor, heads)
            add(f"blk.{layer}.{ours}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
