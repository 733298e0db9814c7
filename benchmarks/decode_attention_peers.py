"""What benchmarks/decode_attention.py holds our kernel against: other libraries' attention over the same batch.

A peer is made for a case, outside of what is timed: its plan, mask or gathered keys, which an engine would have to make
again whenever lengths change. None where its library is not installed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from decode_attention_case import MAX_MODEL_LEN, PAGE, Case, Form
from torch import Tensor


def torch_flash(case: Case) -> Form:
    """FlashAttention 2 as PyTorch brings it: its pages hold 256 positions or more, so it gets contiguous keys."""
    starts = torch.tensor([0, *case.contexts]).cumsum(0).int().to("cuda")
    contiguous: dict[int, list[Tensor]] = {}
    for pair in case.caches:
        contiguous[pair[0].data_ptr()] = [
            torch.cat([cache[t[: -(-n // PAGE)].long()].flatten(0, 1)[:n]
                       for t, n in zip(case.batch.block_tables, case.contexts, strict=True)])
            for cache in pair
        ]  # fmt: skip

    def run(q: Tensor, k: Tensor, _v: Tensor) -> Tensor:
        keys, values = contiguous[k.data_ptr()]
        return torch.ops.aten._flash_attention_forward(
            q, keys, values, case.batch.query_start, starts, case.rows, max(case.contexts), 0.0, True, False,
            scale=case.scale,
        )[0]  # fmt: skip

    return run


def flash_attention_3(case: Case) -> Form | None:
    """FlashAttention 3 over the same pages, lengths on the device: vLLM's build."""
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    batch = case.batch

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_varlen_func(
            q.contiguous(), k, v, max_seqlen_q=case.rows, cu_seqlens_q=batch.query_start, max_seqlen_k=MAX_MODEL_LEN,
            seqused_k=batch.context_lens, block_table=batch.block_tables, softmax_scale=case.scale, causal=True,
            fa_version=3,
        )  # fmt: skip

    return run


def flash_infer(case: Case, backend: str) -> Form | None:
    """FlashInfer over the same pages; its plan (how keys are split) is made from lengths on the host."""
    try:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper
    except ImportError:
        return None
    heads, kv_heads, dim = case.heads
    batch, lengths = case.batch, torch.tensor(case.contexts)
    pages = -(-lengths // PAGE)
    indices = torch.cat([table[:n] for table, n in zip(batch.block_tables.cpu(), pages.tolist(), strict=True)])
    starts = torch.cat([torch.zeros(1, dtype=torch.long), pages.cumsum(0)]).int()
    wrapper = BatchPrefillWithPagedKVCacheWrapper(
        torch.zeros(256 << 20, dtype=torch.uint8, device="cuda"), "NHD", use_cuda_graph=True, backend=backend,
        qo_indptr_buf=torch.empty_like(batch.query_start), paged_kv_indptr_buf=torch.empty_like(starts, device="cuda"),
        paged_kv_indices_buf=torch.empty_like(indices, device="cuda"),
        paged_kv_last_page_len_buf=torch.empty(len(lengths), dtype=torch.int32, device="cuda"),
    )  # fmt: skip
    wrapper.plan(
        batch.query_start.cpu(), starts, indices.to("cuda"), ((lengths - 1) % PAGE + 1).int(), heads, kv_heads, dim,
        PAGE, causal=True, sm_scale=case.scale, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    return lambda q, k, v: wrapper.run(q.contiguous(), (k, v))


def flex(case: Case) -> Form:
    """FlexAttention over gathered keys, padded to the longest a request may have; lengths on the device."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    requests, rows, lengths = len(case.contexts), case.rows, case.batch.context_lens
    tables = case.batch.block_tables.long().clamp(max=requests * case.batch.block_tables.shape[1] - 1)
    gathered = {
        pair[0].data_ptr(): [cache[tables].flatten(1, 2).transpose(1, 2).contiguous() for cache in pair]
        for pair in case.caches
    }  # [requests, kv heads, MAX_MODEL_LEN, D]

    def visible(b: Tensor, _h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return key <= lengths[b] - rows + row

    torch._dynamo.reset()  # every case is a size of its own, and past eight of one function Dynamo gives up
    mask = create_block_mask(visible, requests, None, rows, MAX_MODEL_LEN, device="cuda")
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)

    def run(q: Tensor, k: Tensor, _v: Tensor) -> Tensor:
        keys, values = gathered[k.data_ptr()]
        query = q.reshape(requests, rows, *q.shape[1:]).transpose(1, 2)
        out = compiled(query, keys, values, block_mask=mask, scale=case.scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return run


PEERS: dict[str, Callable[[Case], Form | None]] = {
    "FlashAttention 2": torch_flash,
    "FlashAttention 3": flash_attention_3,
    "FlashInfer, FA2": lambda case: flash_infer(case, "fa2"),
    "FlashInfer, FA3": lambda case: flash_infer(case, "fa3"),
    "FlexAttention": flex,
}
