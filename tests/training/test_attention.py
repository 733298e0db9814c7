"""The implementations of the attention rule agree, and none sees a row it should not."""

from __future__ import annotations

import pytest
import torch

from peagle.errors import InputError
from peagle.training.attention import RowAttention, _ordered, block_overlap, choose_backend, flex_block_mask
from peagle.training.flash import DEPTHS, flash_problem, key_codes, query_codes

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


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
@pytest.mark.parametrize("start", [0, 8_000_000])
def test_codes_are_the_rule(kind: str, start: int) -> None:
    """FlashAttention's mask compares codes; the end of a pack of eight million anchors, 7 documents, fillers."""
    pack = tiny_pack((3, 1, 40, 2, 17, 5, 60), 30)
    table = table_of(pack, kind, 4)
    (chunk,) = chunks_of(pack, table, kind, table.num_anchors, 4, row_multiple=128)
    fill = -chunk.num_rows % 128
    pad = torch.nn.functional.pad
    facts = (
        pad(chunk.anchor + start, (0, fill), value=start).int(),
        pad(chunk.first + start, (0, fill), value=start).int(),
        pad(chunk.depth, (0, fill), value=-1).int(),
    )
    anchor, _, depth = facts
    first, own, chain, last = (x[:, None] for x in query_codes(*facts))
    code = key_codes(anchor, depth)
    seen = ((code >= first) & (code <= own)) | ((code > chain) & (code <= last))
    mask = flex_block_mask(*facts, anchor, depth)
    assert torch.equal(seen, mask.mask_mod(0, 0, torch.arange(len(anchor))[:, None], torch.arange(len(anchor))))


@pytest.mark.parametrize(("rows", "columns"), [(5, 1), (1, 5), (4, 3)])
def test_lists_of_tiles_lie_in_rows(rows: int, columns: int) -> None:
    """FlashAttention refuses other strides, of dimensions of size 1 too."""
    for tiles in (torch.ones(rows, columns, dtype=torch.bool), torch.ones(columns, rows, dtype=torch.bool).T):
        count, indices = _ordered(tiles)
        assert (count.shape, count.stride()[-1]) == ((1, 1, rows), 1)
        assert (indices.shape, indices.stride()[-2:]) == ((1, 1, rows, columns), (columns, 1))
        assert indices[0, 0].tolist() == [list(range(columns))] * rows


def test_codes_of_the_deepest_chains() -> None:
    anchor, depth = torch.tensor([0, 0, 1, 1]), torch.tensor([DEPTHS - 1, 1, 1, DEPTHS - 1])
    _, _, chain, last = (x[:, None] for x in query_codes(anchor, torch.zeros(4, dtype=torch.int64), depth))
    code = key_codes(anchor, depth)
    seen = (code > chain) & (code <= last)
    assert seen.int().tolist() == [[1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


def test_which_implementation() -> None:
    cpu = torch.device("cpu")
    assert choose_backend("auto", cpu, torch.float32, 64) == choose_backend("dense", cpu, torch.float32, 64) == "dense"
    with pytest.raises(InputError, match=r"attention: got 'flex', which needs a CUDA device"):
        choose_backend("flex", cpu, torch.float32, 64)
    with pytest.raises(InputError, match=r"attention: got 'flash', which needs a Hopper GPU"):
        choose_backend("flash", cpu, torch.bfloat16, 64)


def test_what_flash_cannot_take(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert flash_problem(cuda, torch.float32, 64) == "computes in 16 bits, and the head in float32"
    assert flash_problem(cuda, torch.bfloat16, 80) == "is right with head_dim 64 and 128, and it is 80"
    assert flash_problem(cuda, torch.bfloat16, 128) == "needs the package flash-attn-4"
    assert choose_backend("auto", cuda, torch.bfloat16, 128) == "flex"
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    assert choose_backend("auto", cuda, torch.bfloat16, 128) == "flash"
    assert choose_backend("auto", cuda, torch.float32, 128) == "flex"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (10, 0))
    assert choose_backend("auto", cuda, torch.bfloat16, 128) == "flex"


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
@pytest.mark.parametrize(
    ("backend", "dtype", "dim"),
    [
        ("flex", torch.float32, 64),
        ("flex", torch.bfloat16, 64),
        *(("flash", torch.bfloat16, dim) for dim in (64, 128)),
    ],
)
def test_on_a_gpu_equals_dense(backend: str, dtype: torch.dtype, dim: int) -> None:
    from peagle.training.chunks import to_device

    device = torch.device("cuda")
    if backend == "flash" and (problem := flash_problem(device, dtype, dim)) is not None:
        pytest.skip(f"FlashAttention 4 {problem}")
    torch.manual_seed(0)
    for chunk in (to_device(c, device) for c in rows_of("p-eagle", 220)):
        rows = chunk.num_rows
        shapes = [(rows, 6, dim), (rows, 2, dim), (rows, 2, dim), (440, 2, dim), (440, 2, dim)]
        seed = torch.randn(rows, 6, dim, device=device, dtype=dtype)
        values = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
        results = []
        for way in ("dense", backend):
            leaves = [x.clone().requires_grad_() for x in values]
            q, k, v, pk, pv = leaves
            out = RowAttention(chunk, way, [(pk, pv)], 0).over(0, rows)(0, q, k, v)  # type: ignore[arg-type]
            out.backward(seed)
            results.append([out.detach()] + [leaf.grad for leaf in leaves])
        for dense, found in zip(*results, strict=True):
            # the first chunk sees nothing of the prefix: those gradients are zero
            assert (dense - found).norm() <= (2e-3 if dtype == torch.float32 else 2e-2) * dense.norm()
