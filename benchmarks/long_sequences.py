"""Train a head of an 8B target on sequences of 8K to 128K tokens: tokens/s and peak memory of one optimizer step.

python benchmarks/long_sequences.py -o long                    # on one GPU; long/results.json, long/lengths.png
python benchmarks/long_sequences.py -o long --parts flat       # a part alone; results are added to the same file
python benchmarks/long_sequences.py -o tiny --tiny             # tiny dimensions, on a CPU in seconds
python benchmarks/long_sequences.py -o long --plot-only --beside long-speculators/results.json

Parts: `matmul` (the card's bf16 rate), `lengths` (the sequence partition), `attention` (alone, at 8K), and `flat` (all
N K rows at once, the plain mask as a FlexAttention block mask, until it fails). The target's states are random numbers
on the device, so no target runs; a step is everything else that training does: teacher logits over the whole
vocabulary, forward, loss, backward, clipping, AdamW in float32, the bf16 copy.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
import torch.nn.functional as F
from long_common import EIGHT_B, TINY, Shape, facts, measure, plot, seconds_of, show, until_it_fails, write
from torch import Tensor

from peagle.drafter import Drafter, DrafterConfig
from peagle.drafter.model import Attend
from peagle.training.attention import BLOCK, RowAttention, _flex_attention, choose_backend
from peagle.training.chunks import Chunk, make_chunk, round_up, scale_weights, to_device
from peagle.training.fuse import fuse_elementwise
from peagle.training.losses import LossSettings, head_loss
from peagle.training.memory import choose_loss_rows
from peagle.training.partition import forward_chunk, train_pack
from peagle.training.precision import ComputeCopy
from peagle.training.rows import PAD_DEPTH, RowTable, build_rows


class Training:
    """A head with its optimizer, and a target of which only embeddings and LM head exist."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        cuda = device.type == "cuda"
        self.dtype = torch.bfloat16 if cuda else torch.float32
        self.backend = choose_backend("auto", device)
        config = DrafterConfig(
            kind="p-eagle", hidden_size=shape.hidden, intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim, vocab_size=shape.vocab, draft_vocab_size=shape.draft_vocab,
            aux_hidden_state_layer_ids=(2, 16, 29), mask_token_id=shape.vocab - 1, own_lm_head=True,
            max_position_embeddings=1 << 20, rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        )  # fmt: skip
        torch.manual_seed(0)
        with torch.device(device):
            self.drafter = Drafter(config)
            assert self.drafter.lm_head is not None
            self.drafter.lm_head.weight.requires_grad_(False)  # as `peagle train` leaves it
            self.copy = ComputeCopy(self.drafter, self.dtype)
            self.head = torch.randn(shape.vocab, shape.hidden, dtype=self.dtype) / shape.hidden**0.5
            self.copy.bind(torch.randn(shape.vocab, shape.hidden, dtype=self.dtype), self.head)
        if cuda:
            fuse_elementwise(self.copy.compute)
        self.parameters = [p for p in self.drafter.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-5, fused=cuda)
        self.loss_rows = choose_loss_rows(shape.vocab, shape.draft_vocab, device, self.dtype.itemsize, 1 << 36)
        self.loss = LossSettings(
            kind="soft",
            depths=shape.depths,
            kernel="triton" if cuda else "plain",
            target_ids=torch.arange(shape.draft_vocab, device=device),
        )

    def states(self, length: int) -> tuple[Tensor, Tensor]:
        """Random auxiliary states [N, 3H] and hidden states [N, H]."""
        make = lambda width: torch.randn(length, width, dtype=self.dtype, device=self.device)  # noqa: E731
        return make(3 * self.shape.hidden), make(self.shape.hidden)

    def chunk_loss(self, hidden: Tensor) -> Callable[[Tensor, Chunk], tuple[Tensor, Tensor]]:
        def loss(normed: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
            teacher = lambda rows: rows @ self.head.T  # noqa: E731
            result = head_loss(normed, self.copy.compute.lm_head_weight(), chunk.loss, hidden, teacher, self.loss)
            return result.loss, result.stats

        return loss

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.copy.refresh()

    def forget(self) -> None:
        for module in (self.drafter, self.copy.compute):
            module.zero_grad(set_to_none=True)


def sampled_rows(shape: Shape, length: int, keep_rate: float) -> RowTable:
    """Rows of one document that fills the pack; everything but its first token is an answer."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, shape.vocab - 1, (length,), generator=generator)
    answers = torch.arange(length) > 0
    documents = torch.zeros(length, dtype=torch.int64)
    return build_rows(tokens, documents, answers, shape.depths, keep_rate, generator, shape.vocab - 1)


def make_chunks(training: Training, table: RowTable, size: int) -> list[Chunk]:
    """Chunks of `size` anchors, all of one number of rows, so that the length compiles once."""
    n = table.num_anchors
    cuts = torch.tensor([*range(0, n, size), n])
    multiple = 1
    if training.backend == "flex":
        multiple = round_up(int(table.chain_offsets[cuts].diff().max()) + size, BLOCK) - size
    chunks = [
        make_chunk(
            table, start, min(start + size, n), stepwise=False, depths=training.shape.depths,
            tokens=torch.zeros(n, dtype=torch.int64), row_multiple=multiple, slice_rows=training.loss_rows,
            loss_multiple=BLOCK if training.device.type == "cuda" else 1,
        )
        for start in range(0, n, size)
    ]  # fmt: skip
    total = sum(float(chunk.loss.weight.sum()) for chunk in chunks)
    return [to_device(scale_weights(chunk, 1.0 / total), training.device) for chunk in chunks]


def partition(training: Training, length: int, size: int, times: int) -> dict[str, Any]:
    """One optimizer step over a sequence, chunk by chunk."""
    began = time.perf_counter()
    chunks = make_chunks(training, sampled_rows(training.shape, length, training.shape.keep_rate), size)
    made = time.perf_counter() - began
    aux, hidden = training.states(length)
    loss = training.chunk_loss(hidden)

    def run(chosen: list[Chunk]) -> None:
        train_pack(training.copy.compute, chosen, aux, loss, training.backend)

    # one chunk of each shape beside the last one compiles all that the whole sequence needs
    shapes = {chunk.num_rows: chunk for chunk in reversed(chunks[:-1])}
    warm = seconds_of(training.device, lambda: run([*sorted(shapes.values(), key=lambda c: c.start), chunks[-1]]))
    training.update()  # makes Adam's state

    def step() -> None:
        run(chunks)
        training.update()

    row = measure(training.device, length, step, times)
    return row | {
        "rows": sum(chunk.num_rows for chunk in chunks),
        "chunk_size": size,
        "chunks": len(chunks),
        "shapes": len({chunk.num_rows for chunk in chunks}),
        "seconds_to_make_rows": made,
        "seconds_to_warm_up": warm,
    }


# -- the plain way --------------------------------------------------------------------------------------------------


def by_depth(chunk: Chunk) -> Chunk:
    """The same rows, depth after depth: the order that they are sampled in when nobody thinks of tiles."""
    order = torch.where(chunk.depth == PAD_DEPTH, 1 << 20, chunk.depth).argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    moved = {name: getattr(chunk, name)[order] for name in ("token", "position", "anchor", "first", "depth")}
    return replace(chunk, **moved, loss=replace(chunk.loss, index=place[chunk.loss.index]))


@functools.cache
def compiled_block_mask() -> Callable[..., Any]:
    """FlexAttention's own function; uncompiled it would write out all [N K, N K] pairs."""
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask, dynamic=False)


class PlainAttention:
    """All rows at once under the rule of attention, made into a block mask by FlexAttention's own function."""

    def __init__(self, chunk: Chunk) -> None:
        anchor, first, depth = chunk.anchor.int(), chunk.first.int(), chunk.depth.int()

        def visible(_batch: Any, _head: Any, q: Tensor, k: Tensor) -> Tensor:
            context = (depth[k] == 0) & (anchor[k] <= anchor[q]) & (anchor[k] >= first[q])
            chain = (depth[k] > 0) & (anchor[k] == anchor[q]) & (depth[k] <= depth[q])
            return context | chain

        rows = torch.arange(chunk.num_rows, device=anchor.device)
        self.flex = anchor.device.type == "cuda"
        self.mask: Any = None
        if self.flex:
            count = chunk.num_rows
            self.mask = compiled_block_mask()(visible, None, None, count, count, device=anchor.device.type)
        else:
            self.mask = visible(None, None, rows[:, None], rows)

    def over(self, _lo: int, _hi: int) -> Attend:
        def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            if self.flex:
                out = _flex_attention("cuda")(q, k, v, block_mask=self.mask, enable_gqa=True)
            else:
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, enable_gqa=True)
            return out[0].transpose(0, 1)

        return attend


def flat_loss(training: Training, chunk: Chunk, aux: Tensor, hidden: Tensor) -> Tensor:
    """Forward over all rows of a sequence in one graph."""
    normed = forward_chunk(training.copy.compute, chunk, aux, PlainAttention(chunk))  # type: ignore[arg-type]
    return training.chunk_loss(hidden)(normed, chunk)[0]


def flat(training: Training, length: int, times: int) -> dict[str, Any]:
    """One optimizer step over all N K rows of a sequence at once, none sampled away."""
    (chunk,) = make_chunks(training, sampled_rows(training.shape, length, 1.0), length)
    chunk = by_depth(chunk)
    aux, hidden = training.states(length)

    def step() -> None:
        flat_loss(training, chunk, aux, hidden).backward()
        training.update()

    try:
        step()
        return measure(training.device, length, step, times) | {"rows": chunk.num_rows}
    finally:
        training.forget()


# -- attention alone ------------------------------------------------------------------------------------------------


def matmul_rate(device: torch.device, size: int) -> float:
    """FLOP/s of a square bf16 matrix product."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = 20 if device.type == "cuda" else 2
    product = lambda: [a @ b for _ in range(times)]  # noqa: E731
    product()
    return 2.0 * size**3 * times / seconds_of(device, product)


def allowed_pairs(chunk: Chunk) -> int:
    """Pairs (row, row it sees) that the rule of attention allows, fillers left out."""
    real = chunk.depth >= 0
    return int(((chunk.anchor - chunk.first + 1 + chunk.depth) * real).sum())


def attention_alone(training: Training, length: int, times: int) -> dict[str, Any]:
    """Forward and backward of one layer's attention over the sampled rows of a sequence, ours and the plain way."""
    shape, device = training.shape, training.device
    (chunk,) = make_chunks(training, sampled_rows(shape, length, shape.keep_rate), length)
    pairs = allowed_pairs(chunk)
    flops = 4.0 * pairs * shape.head_dim * shape.heads
    found: dict[str, Any] = {"length": length, "rows": chunk.num_rows, "pairs": pairs}

    def make(heads: int) -> Tensor:
        return torch.randn(chunk.num_rows, heads, shape.head_dim, device=device, dtype=training.dtype).requires_grad_()

    q, k, v = make(shape.heads), make(shape.kv_heads), make(shape.kv_heads)
    gradient = torch.randn_like(q)
    ways: dict[str, Callable[[], Attend]] = {
        "ours": lambda: RowAttention(chunk, training.backend).over(0, chunk.num_rows),
        "plain": lambda: PlainAttention(by_depth(chunk)).over(0, chunk.num_rows),
    }
    for name, way in ways.items():
        attend = way()
        torch.autograd.grad(attend(0, q, k, v), (q, k, v), gradient)
        masks = seconds_of(device, lambda way=way: [way() for _ in range(times)]) / times  # type: ignore[misc]
        forward = backward = 0.0
        for _ in range(times):
            attend = way()
            outs: list[Tensor] = []
            forward += seconds_of(device, lambda a=attend, o=outs: o.append(a(0, q, k, v)))  # type: ignore[misc]
            backward += seconds_of(device, lambda o=outs: torch.autograd.grad(o[0], (q, k, v), gradient))  # type: ignore[misc]
        found[name] = {
            "mask_seconds": masks,
            "forward_seconds": forward / times,
            "backward_seconds": backward / times,
            "forward_flops": flops * times / forward,
            "backward_flops": 2.5 * flops * times / backward,
        }
    return found


def show_attention(found: dict[str, Any], rate: float | None) -> None:
    for name in ("ours", "plain"):
        row = found[name]
        parts = []
        for way in ("forward", "backward"):
            share = f" ({row[f'{way}_flops'] / rate:.0%} of the matmul rate)" if rate else ""
            parts.append(f"{way} {1e3 * row[f'{way}_seconds']:.2f} ms, {row[f'{way}_flops'] / 1e12:.1f} TFLOP/s{share}")
        print(f"attention, {name:<6} {'; '.join(parts)}; mask {1e3 * row['mask_seconds']:.2f} ms", flush=True)


# -- the run --------------------------------------------------------------------------------------------------------


def draw(folder: Path, results: dict[str, Any], beside: Path | None) -> None:
    lines = {"peagle, partition": results.get("lengths", []), "peagle, flat (all N K rows)": results.get("flat", [])}
    if beside is not None:
        other = json.loads(beside.read_text())
        lines[f"speculators {other.get('speculators', '')}"] = other["lengths"]
    lines = {name: rows for name, rows in lines.items() if rows}
    title = f"{results['device']}, {results['date']}: one optimizer step of a head of an 8B target, K = 8, r = 0.8"
    plot(folder / "lengths.png", lines, title)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("long"))
    parser.add_argument("--parts", default="matmul,lengths,attention,flat")
    parser.add_argument("--lengths", default="8192,32768,65536,131072")
    parser.add_argument("--flat-from", type=int, default=8192, help="first length of the flat pass; doubled until")
    parser.add_argument("--flat-to", type=int, default=32768)
    parser.add_argument("--attention-length", type=int, default=8192)
    parser.add_argument("--chunk-size", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=1, help="measured steps a length (3 up to 8192 tokens)")
    parser.add_argument("--seconds", type=float, default=540, help="start nothing new after so many")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--beside", type=Path, help="results.json of long_speculators.py, for the plot")
    parser.add_argument("--plot-only", action="store_true")
    args = parser.parse_args(arguments)
    began, device, file = time.monotonic(), torch.device(args.device), args.output / "results.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if args.plot_only:
        draw(args.output, results, args.beside)
        return results
    shape = TINY if args.tiny else EIGHT_B
    results |= facts(shape, device)
    late = lambda: time.monotonic() - began > args.seconds  # noqa: E731
    training = Training(shape, device)
    count = sum(p.numel() for p in training.parameters)
    results["trained_parameters"] = count
    print(
        f"{count:,} parameters trained; {results['device']}; ready after {time.monotonic() - began:.1f} s", flush=True
    )
    for part in args.parts.split(","):
        if part == "matmul":
            results["matmul_flops"] = matmul_rate(device, 8192 if device.type == "cuda" else 256)
            print(f"bf16 matmul: {results['matmul_flops'] / 1e12:.1f} TFLOP/s")
        elif part == "lengths":
            results["lengths"] = []
            for n in (int(text) for text in args.lengths.split(",")):
                if late():
                    print(f"N = {n}: not reached in {args.seconds:g} s")
                    continue
                times = max(args.steps, 3 if n <= 8192 else 1)
                row = until_it_fails(device, n, lambda n=n, t=times: partition(training, n, args.chunk_size, t))
                training.forget()
                results["lengths"].append(row)
                show("partition", row)
                write(file, results)
        elif part == "attention" and not late():
            results["attention"] = attention_alone(training, args.attention_length, 10 if device.type == "cuda" else 1)
            show_attention(results["attention"], results.get("matmul_flops"))
        elif part == "flat":
            results["flat"] = []
            n = args.flat_from
            while n <= args.flat_to and not late():
                row = until_it_fails(device, n, lambda n=n: flat(training, n, 1))
                results["flat"].append(row)
                show("flat, N K rows", row)
                if "failed" in row:
                    break
                n *= 2
        write(file, results)
        print(f"  {part}: done after {time.monotonic() - began:.1f} s", flush=True)
    draw(args.output, results, args.beside)
    return results


if __name__ == "__main__":
    main()
