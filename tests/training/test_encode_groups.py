"""The target's states in their places, however documents are grouped for it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from peagle.training.encode import encode_packs

from .helpers import listed_answers, tiny_target
from .test_batches import maker


@pytest.mark.parametrize("overhead", [0, 16, 10**6])
def test_states_lie_where_their_tokens_lie(overhead: int) -> None:
    answers, target = listed_answers(12), tiny_target()
    packs = [[0, 1], [2], [3, 4]]
    batch = maker(answers, encode_overhead=overhead).make(0, packs, 1)
    aux, hidden = encode_packs(target, batch.groups, 3 * 64, (1, 2, 3), torch.float32)
    for number, pack in enumerate(packs):
        at = number * 64
        groups = [g.only(range(at, at + 64), at) for g in batch.groups]
        one, _ = encode_packs(target, [g for g in groups if g is not None], 64, (1, 2, 3), torch.float32)
        assert torch.allclose(one, aux[number * 64 : (number + 1) * 64], atol=1e-5)
        for document in pack:
            ids = torch.from_numpy(answers[document].input_ids.astype(np.int64))[None]
            alone = target.encode(ids, (1, 2, 3))
            span = slice(at, at + ids.shape[1])
            assert torch.allclose(aux[span], alone.aux[0], atol=1e-5)
            assert torch.allclose(hidden[span], alone.hidden[0], atol=1e-5)
            at += ids.shape[1]
