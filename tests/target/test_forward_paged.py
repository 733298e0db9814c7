"""The paged forward against the dense one: logits and auxiliary states, every architecture, fp32 within 1e-4.

Contexts are several times the sliding window of gpt-oss and Gemma (8), block tables are scattered, and slots that no
row has written hold NaN.
"""

import pytest
import torch

from peagle.target import Target, load_target
from tests.target.paging import Paged, Rows, dense

AUX = (1, 3, 6)
LENGTHS = (45, 1, 70, 23)  # 70 rows at once take the prefill path of the PyTorch attention, the others the grouped one


def random_tokens(length, seed):
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_rows_equal(got, expected, what):
    for name, mine, theirs in zip(("logits", "aux"), got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{what}, {n}: {m}")


@pytest.fixture
def requests(any_target):
    sequences = [random_tokens(length, seed) for seed, length in enumerate(LENGTHS)]
    return any_target, sequences, [dense(any_target, s, AUX) for s in sequences]


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_whole_prefill_of_several_requests(requests, block_size):
    target, sequences, expected = requests
    paged = Paged(target, len(sequences), max(LENGTHS), block_size)
    got = paged.run([Rows(r, 0, s) for r, s in enumerate(sequences)], AUX)
    for r in range(len(sequences)):
        assert_rows_equal(got[r], expected[r], f"request {r}")


@pytest.mark.parametrize(("chunk", "block_size"), [(1, 4), (7, 4), (13, 16), (5, 3)])
def test_chunked_prefill(requests, chunk, block_size):
    """Requests of different lengths leave the batch as they finish; the order within the batch changes every step."""
    target, sequences, expected = requests
    paged = Paged(target, len(sequences), max(LENGTHS), block_size)
    for step, start in enumerate(range(0, max(LENGTHS), chunk)):
        rows = [Rows(r, start, s[start : start + chunk]) for r, s in enumerate(sequences) if start < len(s)]
        if step % 2:
            rows.reverse()
        for row, got in zip(rows, paged.run(rows, AUX), strict=True):
            stop = row.start + len(row.tokens)
            wanted = tuple(whole[row.start : stop] for whole in expected[row.request])
            assert_rows_equal(got, wanted, f"request {row.request}, rows {row.start} to {stop}")


def test_prefill_decode_and_verification_in_one_batch(requests):
    """One request prefills, one decodes a row a step, one verifies rows of which some are wrong and run again."""
    target, sequences, expected = requests
    paged = Paged(target, len(sequences), max(LENGTHS) + 8, 4)
    paged.run([Rows(0, 0, sequences[0][:20]), Rows(3, 0, sequences[3][:11])])
    verified = 11
    for step in range(10):
        decode = Rows(0, 20 + step, sequences[0][20 + step : 21 + step])
        prefill = Rows(2, 7 * step, sequences[2][7 * step : 7 * step + 7])
        accepted = step % 3  # drafts that are right; the rest of the four are not and will be overwritten
        right = sequences[3][verified : verified + 1 + accepted]
        verify = Rows(3, verified, right + [(t + 1) % 256 for t in random_tokens(5 - len(right), seed=90 + step)])
        got = paged.run([verify, decode, prefill], AUX)
        assert_rows_equal(got[1], tuple(e[20 + step : 21 + step] for e in expected[0]), f"decode, step {step}")
        assert_rows_equal(got[2], tuple(e[7 * step : 7 * step + 7] for e in expected[2]), f"prefill, step {step}")
        kept = tuple(part[: len(right)] for part in got[0])
        wanted = tuple(e[verified : verified + len(right)] for e in expected[3])
        assert_rows_equal(kept, wanted, f"verification, step {step}")
        verified += len(right)
        if verified + 3 > len(sequences[3]):
            break
    assert step >= 4


def test_rejected_rows_equal_their_own_continuation(any_target):
    """Every row of a verification step is the dense forward of the tokens before it, right or wrong."""
    sequence = random_tokens(40, seed=5)
    paged = Paged(any_target, 1, 40, 16)
    paged.run([Rows(0, 0, sequence[:33])])
    (got,) = paged.run([Rows(0, 33, sequence[33:])], AUX)
    logits, aux = dense(any_target, sequence, AUX)
    assert_rows_equal(got, (logits[33:], aux[33:]), "verification rows")


def test_rows_without_a_slot_write_nothing(tiny_target):
    target = tiny_target("llama")
    paged = Paged(target, 1, 8, 4)
    for k, v in paged.cache:
        k.fill_(7.0)
        v.fill_(7.0)
    tokens, batch = paged.batch([Rows(0, 0, random_tokens(5, seed=1))])
    batch.slot_mapping[3:] = -1
    target.forward_paged(tokens, batch.positions, batch, paged.cache)
    for pool in (pool for layer in paged.cache for pool in layer):
        flat = pool.flatten(0, 1)
        written = torch.zeros(len(flat), dtype=torch.bool)
        written[batch.slot_mapping[:3]] = True
        assert (flat[written] != 7.0).all()
        assert (flat[~written] == 7.0).all()


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_bfloat16(target_folder, name):
    """The same in bfloat16, as far as that goes: errors of the two orders of summation, not of masks."""
    target = load_target(str(target_folder(name)), dtype="bfloat16", device="cpu")
    sequence = random_tokens(40, seed=6)
    paged = Paged(target, 1, 40, 4)
    first = paged.run([Rows(0, 0, sequence[:25])], AUX)[0]
    second = paged.run([Rows(0, 25, sequence[25:])], AUX)[0]
    together = [torch.cat(parts) for parts in zip(first, second, strict=True)]
    for mine, theirs in zip(together, dense(target, sequence, AUX), strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.float() - theirs.float()).norm() < 0.1 * theirs.float().norm()


def test_logit_rows_and_no_aux(tiny_target):
    target = tiny_target("llama")
    sequence = random_tokens(12, seed=2)
    paged = Paged(target, 1, 12, 4)
    tokens, batch = paged.batch([Rows(0, 0, sequence)])
    logits, aux = target.forward_paged(tokens, batch.positions, batch, paged.cache, torch.tensor([11, 3]))
    expected, _ = dense(target, sequence, (1,))
    torch.testing.assert_close(logits, expected[[11, 3]], rtol=1e-4, atol=1e-4)
    assert aux is None
    logits, aux = target.forward_paged(tokens, batch.positions, batch, paged.cache, None, AUX)
    assert logits is None
    assert aux is not None
    assert aux.shape == (12, 3 * target.hidden_size)


def test_the_model_still_works_by_itself_afterwards(any_target):
    """A paged forward leaves no setting behind: Transformers' own generate runs on the same model."""
    sequence = random_tokens(10, seed=3)
    before, _ = dense(any_target, sequence, (1,))
    Paged(any_target, 1, 10, 4).run([Rows(0, 0, sequence)])
    after, _ = dense(any_target, sequence, (1,))
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    out = any_target.model.generate(torch.tensor([sequence]), max_new_tokens=2, min_new_tokens=2, do_sample=False)
    assert out.shape == (1, 12)


def test_an_error_inside_leaves_nothing_behind(tiny_target):
    target: Target = tiny_target("llama")
    sequence = random_tokens(6, seed=4)
    before, _ = dense(target, sequence, (1,))
    tokens, batch = Paged(target, 1, 6, 4).batch([Rows(0, 0, sequence)])
    with pytest.raises(IndexError):
        target.forward_paged(tokens, batch.positions, batch, [], None, AUX)
    assert not target._captured
    torch.testing.assert_close(dense(target, sequence, (1,))[0], before, rtol=0, atol=0)
