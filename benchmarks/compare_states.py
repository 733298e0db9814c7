"""How far cached hidden states are from the target's own in float32, whoever computed and stored them.

python benchmarks/compare_states.py TARGET DATA FOLDER...

For each folder of `peagle data hidden-states`: the relative error of each auxiliary layer's and of the last state
(root of summed squares over all tokens), and what the last one's error does to the teacher: mean KL in nats from the
float32 distribution, and the share of tokens whose first choice stays the same.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from peagle.data.dataset import open_dataset
from peagle.target import load_target
from peagle.training.fp8 import from_fp8
from peagle.training.states import StoredStates


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("data")
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    answers = open_dataset(args.data)
    target = load_target(args.target, dtype="float32", device=args.device)
    stored = [StoredStates(folder) for folder in args.folders]
    plan = stored[0].plan
    names = [f"layer {i}" for i in plan.aux_layer_ids] + ["last"]
    layers = len(names)
    errors, sizes = torch.zeros(len(stored), layers, dtype=torch.float64), torch.zeros(layers, dtype=torch.float64)
    kl, same, tokens = torch.zeros(len(stored), dtype=torch.float64), torch.zeros(len(stored), dtype=torch.float64), 0
    documents = [(d, n) for shard in zip(plan.shards, plan.lengths, strict=True) for d, n in zip(*shard, strict=True)]
    for document, length in documents[: args.documents]:
        ids = torch.from_numpy(answers[document].input_ids[:length].astype("int64"))[None].to(target.device)
        own = target.encode(ids, plan.aux_layer_ids)
        true = torch.cat((own.aux[0], own.hidden[0]), dim=1).cpu().double().view(length, layers, -1)
        sizes += true.square().sum((0, 2))
        teacher = target.lm_logits(own.hidden[0]).log_softmax(-1)
        for i, states in enumerate(stored):
            aux, hidden, scale = states.document(document, length)
            if scale is not None:
                aux, hidden = (
                    from_fp8(aux, scale[:, : layers - 1], torch.float32),
                    from_fp8(hidden, scale[:, layers - 1 :], torch.float32),
                )
            found = torch.cat((aux.double(), hidden.double()), dim=1).view(length, layers, -1)
            errors[i] += (found - true).square().sum((0, 2))
            logits = target.lm_logits(hidden.float().to(target.device)).log_softmax(-1)
            kl[i] += float((teacher.exp() * (teacher - logits)).sum())
            same[i] += int((logits.argmax(-1) == teacher.argmax(-1)).sum())
        tokens += length
    results: dict[str, Any] = {"tokens": tokens, "folders": {}}
    for i, states in enumerate(stored):
        relative = (errors[i] / sizes).sqrt().tolist()
        row = dict(zip(names, relative, strict=True)) | {"kl": float(kl[i]) / tokens, "top1": float(same[i]) / tokens}
        results["folders"][str(args.folders[i])] = row
        shown = ", ".join(f"{name} {value:.2e}" for name, value in zip(names, relative, strict=True))
        print(f"{args.folders[i]} ({states.plan.dtype}, {states.plan.computed_in}), {tokens} tokens: relative error "
              f"{shown}; teacher: KL {row['kl']:.2e}, first choice kept {row['top1']:.4f}")  # fmt: skip
    print(json.dumps(results))
    return results


if __name__ == "__main__":
    main()
