"""Tensors of a wrong dtype, or twice under two names: describing, loading and converting say the same of them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from peagle.drafter import load_drafter, save_drafter
from peagle.drafter.convert import convert_head
from peagle.drafter.facts import read_head_facts
from peagle.errors import InputError
from tests.drafter.heads import VOCAB, edit_tensors, make_drafter

WEIGHTS = "expected bfloat16, float16, float32 or float64 (a quantised head is not read)"
OFFSETS = "expected int64, int32, int16, int8 or uint8"


@pytest.fixture
def reduced(tmp_path: Path) -> Path:
    """A head with a reduced vocabulary, which has d2t and t2d."""
    return save_drafter(make_drafter(draft_vocab_size=20, own_lm_head=True), tmp_path / "reduced")


def recast(folder: Path, name: str, dtype: torch.dtype) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))


def assert_refused(folder: Path, *problems: str) -> None:
    assert sorted(read_head_facts(folder).problems) == sorted(problems)
    for refuse in (load_drafter, lambda head: convert_head(head, folder.parent / "out", "native")):
        with pytest.raises(InputError) as refused:
            refuse(folder)
        assert str(refused.value) in problems
    assert not (folder.parent / "out").exists()


@pytest.mark.parametrize(
    "dtype", ["int8", "int32", "uint8", "bool", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]
)
def test_weights_that_are_no_floats(reduced, dtype):
    recast(reduced, "fc.weight", getattr(torch, dtype))
    assert_refused(reduced, f"fc.weight: dtype {dtype}, {WEIGHTS}")


def test_every_wrong_weight_is_told(head):
    recast(head, "mask_hidden", torch.int8)
    recast(head, "midlayer.hidden_norm.weight", torch.bool)
    assert_refused(head, f"layers.0.hidden_norm.weight: dtype bool, {WEIGHTS}", f"mask_hidden: dtype int8, {WEIGHTS}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_floats_of_any_width(head, dtype):
    recast(head, "fc.weight", dtype)
    assert read_head_facts(head).problems == []
    assert load_drafter(head).fc.weight.dtype == dtype
    assert load_drafter(head, dtype=torch.bfloat16).fc.weight.dtype == torch.bfloat16
    found = load_file(convert_head(head, head.parent / "out", "speculators") / "model.safetensors")
    assert found["fc.weight"].dtype == dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex64", "float8_e4m3fn"])
def test_offsets_that_are_no_integers(reduced, dtype):
    recast(reduced, "d2t", getattr(torch, dtype))
    assert_refused(reduced, f"d2t: dtype {dtype}, {OFFSETS}")


def test_offsets_that_map_nothing_are_integers_too(head):
    edit_tensors(head, lambda tensors: tensors.update(d2t=torch.zeros(VOCAB)))
    assert_refused(head, f"d2t: dtype float32, {OFFSETS}")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_offsets_of_any_width(reduced, dtype):
    recast(reduced, "d2t", dtype)
    assert read_head_facts(reduced).problems == []
    assert load_drafter(reduced).d2t.dtype == torch.int64


def test_a_mask_of_the_vocabulary(reduced):
    recast(reduced, "t2d", torch.int64)
    assert read_head_facts(reduced).problems == []
    load_drafter(reduced)
    recast(reduced, "t2d", torch.float32)
    assert_refused(reduced, "t2d: dtype float32, expected bool, int64, int32, int16, int8 or uint8")


def test_tensors_that_are_not_read_may_be_anything(head):
    edit_tensors(head, lambda tensors: tensors.update({"verifier_lm_head.weight": torch.zeros(4, dtype=torch.int8)}))
    assert read_head_facts(head).problems == []
    load_drafter(head)


@pytest.mark.parametrize(
    ("names", "module_name"),
    [
        (("midlayer.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"), "layers.0.mlp.up_proj.weight"),
        (("fc.weight", "model.fc.weight"), "fc.weight"),
        (("midlayer.hidden_norm.weight", "model.layers.0.hidden_norm.weight"), "layers.0.hidden_norm.weight"),
        (("t2d", "model.t2d"), "t2d"),  # not read, but one of them would be lost
    ],
)
@pytest.mark.parametrize("same", [True, False])
def test_one_tensor_under_two_names(reduced, names, module_name, same):
    """Refused even where they are alike, which the files' headers do not tell."""
    first, second = names
    edit_tensors(
        reduced,
        lambda tensors: tensors.update({second: tensors[first].clone() if same else torch.zeros_like(tensors[first])}),
    )
    told = f"{', '.join(sorted(names))}: {module_name} under several names, expected one of them"
    assert_refused(reduced, told)
