"""Loading targets: folders, GGUF files, wheels, and what is refused."""

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from peagle.errors import InputError
from peagle.target import loading
from peagle.target.loading import auto_dtype, eos_ids, load_target, resolve_model, target_fingerprint
from peagle.training.identity import target_identity
from tests.conftest import ARCHITECTURES, make_model, randomise

pytest.importorskip("gguf")
import gguf

from tests.target.tiny_gguf import q8_0, write_llama


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("PEAGLE_CACHE", str(folder))
    return folder


@pytest.fixture(scope="module")
def llama():
    model = make_model("llama")
    randomise(model, seed=3)
    return model


# --- folders ---------------------------------------------------------------------------------------------------------


def test_folder(target_folder):
    target = load_target(str(target_folder("llama")), device="cpu")
    assert target.dtype == torch.float32
    assert target.device.type == "cpu"
    assert target.tokenizer is not None
    assert target.eos_token_ids == {257}
    assert not target.model.training


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_dtype(target_folder, dtype):
    assert load_target(str(target_folder("llama")), dtype=dtype, device="cpu").dtype == getattr(torch, dtype)


def test_auto_is_float32_on_the_cpu_whatever_is_stored(tmp_path, llama):
    stored = make_model("llama").to(torch.bfloat16)
    stored.save_pretrained(tmp_path)
    assert load_target(str(tmp_path), device="cpu").dtype == torch.float32


@pytest.mark.parametrize(
    ("stored", "name", "expected"),
    [
        (torch.float16, "folder", torch.float16),
        (torch.bfloat16, "folder", torch.bfloat16),
        (torch.float32, "folder", torch.bfloat16),
        (None, "folder", torch.bfloat16),
        (torch.float16, "model.Q4_1.gguf", torch.bfloat16),  # what the conversion is stored in
        (torch.float16, "wheel:some-model", torch.bfloat16),
    ],
)
def test_auto_on_a_gpu(llama, stored, name, expected):
    config = copy.deepcopy(llama.config)
    config.dtype = stored
    assert auto_dtype(config, name, "cuda") == expected


def test_rotary_frequencies_stay_float32(target_folder):
    """In bfloat16 they would be off by 0.4%, which is whole turns at long positions."""
    target = load_target(str(target_folder("llama")), dtype="bfloat16", device="cpu")
    assert target.decoder.rotary_emb.inv_freq.dtype == torch.float32


def test_a_folder_without_tokenizer_loads(tmp_path, llama, caplog):
    llama.save_pretrained(tmp_path)
    target = load_target(str(tmp_path), device="cpu")
    assert target.tokenizer is None
    assert f"no tokenizer of {tmp_path} could be loaded" in caplog.text  # it may be a package that is missing
    assert target.eos_token_ids == {257}
    assert target_fingerprint(target)


def test_home_folder_is_expanded(target_folder, monkeypatch):
    folder = target_folder("llama")
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve_model("~/llama") == str(folder)


# --- refusals --------------------------------------------------------------------------------------------------------


def refused(match, name, **arguments):
    with pytest.raises(InputError, match=match) as caught:
        load_target(str(name), **{"device": "cpu", **arguments})
    assert len(str(caught.value)) < 600
    return str(caught.value)


def test_bad_dtype(target_folder):
    refused("dtype: got 'fp8', expected auto or one of float32", target_folder("llama"), dtype="fp8")


def test_bad_device(target_folder):
    for device in ("tpu9", "mps"):  # the second one is a device of PyTorch's
        refused(f"device: got '{device}', expected cpu", target_folder("llama"), device=device)
    if not torch.cuda.is_available():
        refused("device: got 'cuda', but PyTorch sees no GPU", target_folder("llama"), device="cuda")


def test_folder_without_config(tmp_path):
    refused("holds no config.json", tmp_path)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c"])
def test_no_such_folder(name):
    refused("no folder, no GGUF file and no Hub id", name)


@pytest.mark.parametrize("name", ["nobody-here/no-such-model", "no-such-folder"])
def test_unknown_hub_id(name):
    message = refused(f"'{name}' is no folder here and could not be loaded from the Hub", name)
    assert len(message.splitlines()) == 1


def test_damaged_config(tmp_path, target_folder):
    shutil.copytree(target_folder("llama"), tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text('{"model_type": "lla')
    refused("could not be loaded", tmp_path / "m")


def test_truncated_weights(tmp_path, target_folder):
    shutil.copytree(target_folder("llama"), tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    refused("weights of .* could not be loaded", tmp_path / "m")


def test_missing_weights(tmp_path, target_folder):
    shutil.copytree(target_folder("llama"), tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    refused("weights of .* could not be loaded", tmp_path / "m")


def test_a_checkpoint_that_lacks_a_tensor(tmp_path, target_folder):
    shutil.copytree(target_folder("llama"), tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    refused("lack model.layers.3.mlp.up_proj.weight", tmp_path / "m")


def test_not_a_decoder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "architectures": ["T5Model"]}))
    refused("could not be loaded", tmp_path)


# --- end tokens ------------------------------------------------------------------------------------------------------


class Holder:
    def __init__(self, eos_token_id):
        self.eos_token_id = eos_token_id


@pytest.mark.parametrize(
    ("generation", "model", "tokenizer", "expected"),
    [
        (GenerationConfig(eos_token_id=[5, 7]), Holder(5), Holder(9), {5, 7, 9}),
        (None, Holder(0), None, {0}),
        (GenerationConfig(), Holder(None), Holder(3), {3}),
        (None, Holder([1, 2]), Holder(None), {1, 2}),
        (None, Holder(None), None, set()),
    ],
)
def test_eos_ids(generation, model, tokenizer, expected):
    assert eos_ids(model, generation, tokenizer) == expected


def test_eos_ids_of_a_folder_come_from_all_its_files(tmp_path, target_folder):
    shutil.copytree(target_folder("llama"), tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 258]}))
    assert load_target(str(tmp_path / "m"), device="cpu").eos_token_ids == {256, 257, 258}


# --- GGUF ------------------------------------------------------------------------------------------------------------


def test_gguf_gives_the_same_model(tmp_path, cache, llama):
    write_llama(tmp_path / "tiny.gguf", llama)
    target = load_target(str(tmp_path / "tiny.gguf"), device="cpu")
    ids = torch.randint(0, 256, (1, 20))
    with torch.no_grad():
        torch.testing.assert_close(target.model(ids).logits, llama(ids).logits, rtol=1e-4, atol=1e-4)
    assert target.tokenizer.decode(target.tokenizer("plain text").input_ids) == "plain text"
    (folder,) = cache.iterdir()
    assert folder.name.startswith("tiny-")
    assert folder.stat().st_mode & 0o055 == 0o055


def test_quantised_gguf_is_stored_in_float16(tmp_path, cache, llama):
    """Its scales are float16: half the bytes, and no weight moves by more than float16 rounds."""
    write_llama(tmp_path / "tiny.gguf", llama, quantised=True)
    stored = load_file(f"{resolve_model(str(tmp_path / 'tiny.gguf'))}/model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    target = load_target(str(tmp_path / "tiny.gguf"), device="cpu")
    assert target.dtype == torch.float32  # what a CPU computes in
    ours, whole = target.lm_head_weight, llama.lm_head.weight
    quantised = torch.from_numpy(gguf.dequantize(*q8_0(whole.detach().numpy())))
    torch.testing.assert_close(ours, quantised, rtol=2**-11, atol=1e-7)
    assert not torch.equal(ours, whole)


def test_gguf_end_token_is_the_one_its_metadata_names(tmp_path, cache, llama):
    write_llama(tmp_path / "tiny.gguf", llama, end_token="<|unused3|>")
    target = load_target(str(tmp_path / "tiny.gguf"), device="cpu")
    assert target.eos_token_ids == {264}
    assert target.tokenizer.eos_token == "<|unused3|>"


def test_gguf_is_converted_once(tmp_path, cache, llama, monkeypatch):
    write_llama(tmp_path / "tiny.gguf", llama)
    first = resolve_model(str(tmp_path / "tiny.gguf"))
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", None)  # a second conversion would fail
    assert resolve_model(str(tmp_path / "tiny.gguf")) == first
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(tmp_path / "tiny.gguf", tmp_path / "elsewhere" / "tiny.gguf")
    assert resolve_model(str(tmp_path / "elsewhere" / "tiny.gguf")) == first


def test_gguf_files_of_one_name_and_size_are_told_apart(tmp_path, cache, llama):
    """Two fine-tunes of one model: same metadata, same size, other weights."""
    for folder, seed in (("a", 3), ("b", 4)):
        (tmp_path / folder).mkdir()
        model = make_model("llama")
        randomise(model, seed)
        write_llama(tmp_path / folder / "tiny.gguf", model)
    assert (tmp_path / "a" / "tiny.gguf").stat().st_size == (tmp_path / "b" / "tiny.gguf").stat().st_size
    assert resolve_model(str(tmp_path / "a" / "tiny.gguf")) != resolve_model(str(tmp_path / "b" / "tiny.gguf"))


def test_unreadable_gguf(tmp_path, cache, llama):
    write_llama(tmp_path / "tiny.gguf", llama)
    whole = (tmp_path / "tiny.gguf").read_bytes()
    for name, content in (("noise", b"not a model" * 100), ("cut", whole[: len(whole) // 2]), ("empty", b"")):
        (tmp_path / f"{name}.gguf").write_bytes(content)
        refused("cannot be read as GGUF", tmp_path / f"{name}.gguf")
    assert not cache.exists() or not list(cache.iterdir())


def test_gguf_that_is_missing_or_a_folder(tmp_path, cache):
    refused("is not a file, expected a GGUF file", tmp_path / "none.gguf")
    (tmp_path / "folder.gguf").mkdir()
    refused("is not a file, expected a GGUF file", tmp_path / "folder.gguf")


def test_disk_full_while_converting_leaves_nothing(tmp_path, cache, llama, monkeypatch):
    write_llama(tmp_path / "tiny.gguf", llama)

    def full(self, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(llama), "save_pretrained", full)
    refused("cannot write the converted model to .*No space left on device", tmp_path / "tiny.gguf")
    assert not list(cache.iterdir())


def test_cache_that_cannot_be_made(tmp_path, llama, monkeypatch):
    write_llama(tmp_path / "tiny.gguf", llama)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path / "file"))
    refused("cannot write the converted model", tmp_path / "tiny.gguf")


def test_cache_root(monkeypatch, tmp_path):
    monkeypatch.delenv("PEAGLE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert loading.cache_root() == tmp_path / "peagle"


# --- wheels ----------------------------------------------------------------------------------------------------------


def test_wheel_that_is_not_installed():
    refused("package no-such-model-wheel is not installed", "wheel:no-such-model-wheel")


def test_wheel_without_gguf():
    refused("package torch holds no .gguf file", "wheel:torch")


def test_gguf_of_a_wheel(tmp_path, cache, llama, monkeypatch):
    site = tmp_path / "site"
    (site / "tiny_model").mkdir(parents=True)
    write_llama(site / "tiny_model" / "tiny.gguf", llama)
    info = site / "tiny_model-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
    (info / "RECORD").write_text("tiny_model/tiny.gguf,,\n")
    monkeypatch.syspath_prepend(str(site))
    assert resolve_model("wheel:tiny-model") == resolve_model(str(site / "tiny_model" / "tiny.gguf"))


# --- fingerprint -----------------------------------------------------------------------------------------------------


def test_fingerprint_tells_token_meanings_apart(tiny_target, target_folder):
    target = tiny_target("llama")
    assert target_fingerprint(target) == target_fingerprint(tiny_target("qwen3"))  # same tokenizer, same vocabulary
    other = load_target(str(target_folder("llama")), device="cpu")
    other.tokenizer.chat_template = "another"
    assert target_fingerprint(other) != target_fingerprint(target)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_without_layers(target_folder, tiny_target, architecture):
    whole, bare = tiny_target(architecture), load_target(str(target_folder(architecture)), layers="none")
    assert len(bare.layers) == 0
    assert bare.num_layers == whole.num_layers
    assert bare.default_aux_layer_ids() == whole.default_aux_layer_ids()
    assert target_identity(bare) == target_identity(whole)
    hidden = torch.randn(3, whole.hidden_size)
    assert torch.equal(bare.lm_logits(bare.decoder.norm(hidden)), whole.lm_logits(whole.decoder.norm(hidden)))
    host = load_target(str(target_folder(architecture)), layers="host")
    assert len(host.layers) == whole.num_layers
