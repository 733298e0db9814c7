"""The two implementations of the attention rule agree, and neither sees a row it should not."""

from __future__ import annotations

import pytest
import torch

from peagle.training.attention import RowAttention, block_overlap, flex_block_mask

from .helpers import chunks_of, table_of, tile_mask, tiny_pack


def rows_of(kind: str, size: int = 0) -> list:
    pack = tiny_pack((150, 60, 200), 30)
    table = table_of(pack, kind, 4)
    return chunks_of(pack, table, kind, size or table.num_anchors, 4, row_multiple=128)


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_block_mask_is_the_rule(kind: str) -> None:
    (chunk,) = rows_of(kind)
    fill = -chunk.num_rows % 128

    def pad(x: torch.Tensor, value: int) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, fill), value=value).int()

    anchor, first, depth = pad(chunk.anchor, 0), pad(chunk.first, 0), pad(chunk.depth, -1)
    mask = flex_block_mask(anchor, first, depth, anchor, depth)
    rule = mask.mask_mod(0, 0, torch.arange(len(anchor))[:, None], torch.arange(len(anchor)))
    assert torch.equal(tile_mask(mask), rule)
    some, full = block_overlap(anchor, first, depth, anchor, depth)
    tiles = rule.view(len(anchor) // 128, 128, -1, 128)
    assert torch.equal(full, tiles.all(3).all(1))
    assert not (tiles.any(3).any(1) & ~some).any()
    assert rule.any(1).all(), "every row, fillers too, sees something: no NaN from an empty softmax"
    # the transposed lists say the same
    other = type(mask).from_kv_blocks(
        mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices, 128, mask.mask_mod
    )
    for name in ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"):
        assert torch.equal(getattr(other, name), getattr(mask, name)), name


@pytest.mark.parametrize("size", [0, 200])
def test_flex_forward_equals_dense(size: int) -> None:
    torch.manual_seed(0)
    for chunk in rows_of("p-eagle", size):
        q = torch.randn(chunk.num_rows, 6, 16)
        k, v = torch.randn(chunk.num_rows, 2, 16), torch.randn(chunk.num_rows, 2, 16)
        whole = [(torch.randn(440, 2, 16), torch.randn(440, 2, 16))]
        outputs = []
        for backend in ("dense", "flex"):
            attend = RowAttention(chunk, backend, whole, 0).over(0, chunk.num_rows)  # type: ignore[arg-type]
            outputs.append(attend(0, q, k, v))
        assert torch.allclose(*outputs, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_flex_equals_dense(dtype: torch.dtype) -> None:
    from peagle.training.chunks import to_device

    device = torch.device("cuda")
    torch.manual_seed(0)
    for chunk in (to_device(c, device) for c in rows_of("p-eagle", 220)):
        shapes = [(chunk.num_rows, 6, 64), (chunk.num_rows, 2, 64), (chunk.num_rows, 2, 64), (440, 2, 64), (440, 2, 64)]
        seed = torch.randn(chunk.num_rows, 6, 64, device=device, dtype=dtype)
        values = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
        results = []
        for backend in ("dense", "flex"):
            leaves = [x.clone().requires_grad_() for x in values]
            q, k, v, pk, pv = leaves
            out = RowAttention(chunk, backend, [(pk, pv)], 0).over(0, chunk.num_rows)(0, q, k, v)  # type: ignore[arg-type]
            out.backward(seed)
            results.append([out.detach()] + [leaf.grad for leaf in leaves])
        for dense, flex in zip(*results, strict=True):
            # the first chunk sees nothing of the prefix: those gradients are zero
            assert (dense - flex).norm() <= (2e-3 if dtype == torch.float32 else 2e-2) * dense.norm()
