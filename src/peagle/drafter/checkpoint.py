"""Reading and writing heads (DESIGN section 3): the native layout, which stock vLLM loads, and speculators'."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from peagle.drafter.config import DrafterConfig, Kind, with_aux_layers
from peagle.drafter.model import Drafter, make_rotary
from peagle.errors import InputError

Layout = Literal["native", "speculators"]
NATIVE_ARCHITECTURE = "LlamaForCausalLMEagle3"
# vLLM's other names for the same network
READABLE_ARCHITECTURES = (
    NATIVE_ARCHITECTURE,
    "Eagle3LlamaForCausalLM",
    "PeagleLlamaForCausalLM",
    "PEagleDraftModel",
)
MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")  # in vLLM's order of preference


def resolve_head(path: str | os.PathLike[str]) -> Path:
    """A head's folder: a local one as it is, otherwise a Hub id fetched into the Hub's cache."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or str(path).startswith((".", "/", "~")) or str(path).count("/") != 1:
        raise InputError(f"head: {str(path)!r} is not a folder, expected a head's folder or a Hub id like owner/name")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:
        raise InputError(
            f"head: {str(path)!r} is no local folder and could not be had from the Hub ({error.__class__.__name__}: "
            f"{str(error).splitlines()[0]})"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a head's file. Raises InputError naming the file."""
    if not path.is_file():
        raise InputError(f"head: {path} is missing, expected a folder with config.json and *.safetensors")
    try:
        content = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"head: {path} is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise InputError(f"head: {path} holds {type(content).__name__}, expected a JSON object")
    return content


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files, on the CPU; a damaged file is named."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputError(
            f"head: no *.safetensors in {folder} (a pytorch_model.bin is not read: save it as safetensors)"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                tensors.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise InputError(f"head: {file} cannot be read, it may be truncated or damaged ({error})") from error
    return tensors


def _rope(layer: dict[str, Any]) -> dict[str, Any]:
    """RoPE settings from either generation of Llama configs (`rope_parameters`, or `rope_theta` + `rope_scaling`).

    Where a config has both, `rope_scaling` wins, as in Transformers.
    """
    rope = dict(layer.get("rope_scaling") or layer.get("rope_parameters") or {})
    legacy_type = rope.pop("type", "default")
    rope.setdefault("rope_type", legacy_type)
    rope.setdefault("rope_theta", layer.get("rope_theta") or 10000.0)
    return rope


def read_config(folder: Path) -> DrafterConfig:
    """The config of a head in either layout, without its tensors (own embeddings and LM head are told by those)."""
    path = folder / "config.json"
    raw = read_json(path)
    try:
        return parse_config(raw)
    except KeyError as error:
        raise InputError(f"{error.args[0]}: missing in {path}") from error
    except (TypeError, AttributeError, IndexError) as error:
        raise InputError(f"head: {path} holds a value of the wrong type ({error})") from error


def parse_config(raw: dict[str, Any]) -> DrafterConfig:
    """A head's config from the content of config.json in either layout; a KeyError names a missing key."""
    kind: Kind
    own = raw.get("peagle") or {}  # what this package notes beside the keys that others read
    k_train = own.get("k_train")
    speculators = raw.get("speculators_model_type")
    eagle = raw.get("eagle_config") or {}  # where some native heads keep their settings
    if speculators is not None:
        if speculators not in ("peagle", "eagle3"):
            raise InputError(f"speculators_model_type: got {speculators!r}, expected 'peagle' or 'eagle3'")
        kind = "p-eagle" if speculators == "peagle" else "eagle3"
        layer = raw.get("transformer_layer_config")
        if not isinstance(layer, dict):
            raise InputError("transformer_layer_config: missing, expected the drafter layers' config")
        # speculators' own defaults when the key is absent (as vLLM reads them)
        norm_before_residual = bool(raw.get("norm_before_residual", kind == "eagle3"))
        mask = raw.get("mask_token_id")
        if "k_train" not in own:
            methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
            k_train = methods[0].get("speculative_tokens")
    else:
        architectures = raw.get("architectures") or []
        if not any(name in READABLE_ARCHITECTURES for name in architectures):
            raise InputError(f"architectures: got {architectures}, expected {[NATIVE_ARCHITECTURE]}")
        mask = next((raw[key] for key in MASK_TOKEN_KEYS if raw.get(key) is not None), None)
        kind = "p-eagle" if raw.get("parallel_drafting") or mask is not None else "eagle3"
        layer = raw
        norm_before_residual = bool(raw.get("norm_before_residual", False))
    if layer.get("model_type", "llama") != "llama":
        raise InputError(f"model_type: got {layer.get('model_type')!r}, expected 'llama' drafter layers")
    if layer.get("hidden_act", "silu") != "silu":
        raise InputError(f"hidden_act: got {layer.get('hidden_act')!r}, expected 'silu'")
    # heads of other makers often name none: `with_aux_layers` settles it once the target is known
    aux = raw.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids") or ()
    hidden, heads = layer["hidden_size"], layer["num_attention_heads"]
    return DrafterConfig(
        kind=kind,
        hidden_size=hidden,
        intermediate_size=layer["intermediate_size"],
        num_hidden_layers=layer["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=layer.get("num_key_value_heads") or heads,
        head_dim=layer.get("head_dim") or hidden // heads,
        vocab_size=layer["vocab_size"],
        draft_vocab_size=raw.get("draft_vocab_size") or layer["vocab_size"],
        target_hidden_size=raw.get("target_hidden_size") or hidden,
        aux_hidden_state_layer_ids=tuple(aux),
        num_aux_hidden_states=raw.get("num_aux_hidden_states") or layer.get("num_aux_hidden_states") or 0,
        rms_norm_eps=layer.get("rms_norm_eps", 1e-6),
        rope_parameters=_rope(layer),
        max_position_embeddings=layer.get("max_position_embeddings", 2048),
        attention_bias=bool(layer.get("attention_bias", False)),
        norm_before_residual=norm_before_residual,
        norm_before_fc=bool(eagle.get("norm_before_fc", raw.get("norm_before_fc", False))),
        fc_norm=bool(raw.get("fc_norm", layer.get("fc_norm", False))),
        norm_output=bool(raw.get("norm_output", layer.get("norm_output", False))),
        mask_token_id=mask,
        k_train=k_train,
    )


def module_name(name: str) -> str:
    """A checkpoint's tensor name -> this module's."""
    name = name.removeprefix("model.")
    return name.replace("midlayer.", "layers.0.", 1)


# Tensors that heads of other makers carry and that inference does not read (a hidden_norm works in layer 0 only).
IGNORED = re.compile(r"t2d$|^verifier_(lm_head|norm)\.|rotary_emb\.inv_freq$|^layers\.[1-9]\d*\.hidden_norm\.")


def load_drafter(
    path: str | os.PathLike[str],
    kind: Kind | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Drafter:
    """Load a head from a folder or a Hub id. `kind`, when given, must be the head's; `dtype` None keeps the file's.

    Raises InputError naming the key or tensor and what was expected. The caller still has to `bind` the target.
    """
    folder = resolve_head(path)
    config = read_config(folder)
    if kind is not None and config.kind != kind:
        wanted = "parallel_drafting" if kind == "p-eagle" else "no parallel_drafting"
        raise InputError(f"head: {path} is of kind {config.kind}, but the speculative config says {wanted} ({kind})")
    tensors = {module_name(name): tensor for name, tensor in read_tensors(folder).items()}
    tensors = {name: tensor for name, tensor in tensors.items() if not IGNORED.search(name)}
    if config.kind == "p-eagle" and "mask_hidden" not in tensors:
        raise InputError(f"mask_hidden: missing in {folder}, expected a tensor of {config.aux_size} values")
    if "mask_hidden" in tensors and config.kind == "eagle3":
        raise InputError(
            f"mask_hidden: present in {folder}, but its config names no mask token (ptd_token_id or mask_token_id)"
        )
    if config.reduced_vocab and "d2t" not in tensors:
        raise InputError(f"d2t: missing in {folder}, expected it because draft_vocab_size is {config.draft_vocab_size}")
    if not config.reduced_vocab and tensors.pop("d2t", torch.zeros(1)).any():
        raise InputError(
            f"d2t: maps to other ids, but draft_vocab_size is the whole vocabulary ({config.vocab_size}), expected none"
        )
    weight_dtype = tensors["fc.weight"].dtype if "fc.weight" in tensors else torch.bfloat16
    config = replace(
        config,
        own_embed_tokens="embed_tokens.weight" in tensors,
        own_lm_head="lm_head.weight" in tensors,
        dtype=str(weight_dtype).removeprefix("torch."),
    )
    with torch.device("meta"):
        drafter = Drafter(config)
    expected = drafter.state_dict()
    for name, tensor in expected.items():
        if name.endswith("o_proj.bias") and name not in tensors:  # attention_bias on q, k and v only
            tensors[name] = torch.zeros(tensor.shape, dtype=weight_dtype)
        if name not in tensors:
            raise InputError(f"{name}: missing in {folder}, expected shape {list(tensor.shape)}")
        if name == "mask_hidden" and tensors[name].numel() == tensor.numel():
            tensors[name] = tensors[name].reshape(tensor.shape)
        if tensors[name].shape != tensor.shape:
            raise InputError(f"{name}: shape {list(tensors[name].shape)}, expected {list(tensor.shape)}")
    unknown = sorted(set(tensors) - set(expected))
    if unknown:
        raise InputError(f"{unknown[0]}: not a tensor of this kind of head ({len(unknown)} such in {folder})")
    if config.reduced_vocab:
        check_d2t(tensors["d2t"], config.vocab_size)
        tensors["d2t"] = tensors["d2t"].to(torch.int64)
    dtype = dtype or weight_dtype
    drafter = drafter.to_empty(device=device)
    drafter.load_state_dict({n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}, assign=True)
    drafter.to(device)
    drafter.rotary = make_rotary(config).to(device)  # its buffers are not in the file
    return drafter.eval()


def check_d2t(d2t: Tensor, vocab_size: int) -> None:
    """Refuse a mapping that leaves the target's vocabulary or names a token twice."""
    ids = torch.arange(len(d2t)) + d2t.to("cpu", torch.int64)
    bad = ((ids < 0) | (ids >= vocab_size)).nonzero()
    if len(bad):
        i = int(bad[0])
        raise InputError(f"d2t[{i}]: maps to target id {int(ids[i])}, expected 0 to {vocab_size - 1}")
    if len(ids.unique()) != len(ids):
        raise InputError("d2t: two draft ids map to the same target id, expected each target id at most once")


def t2d_of(d2t: Tensor, vocab_size: int) -> Tensor:
    """The mask [V] of target ids that the draft vocabulary holds."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[torch.arange(len(d2t)) + d2t.cpu()] = True
    return t2d


def layer_config(config: DrafterConfig) -> dict[str, Any]:
    """The Llama keys of a head, in both generations of RoPE keys so that older readers find theirs."""
    rope = dict(config.rope_parameters)
    keys: dict[str, Any] = {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": rope,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "attention_bias": config.attention_bias,
        "mlp_bias": False,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "num_aux_hidden_states": config.num_aux_hidden_states,  # vLLM assumes 3 without it
    }
    if rope.get("rope_type", "default") != "default":
        keys["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    return keys


def config_json(config: DrafterConfig, layout: Layout, target_name: str = "") -> dict[str, Any]:
    """`config.json` of a head in one of the two layouts."""
    common: dict[str, Any] = {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "dtype": config.dtype,
        "torch_dtype": config.dtype,
    }
    if config.aux_hidden_state_layer_ids:
        common["eagle_aux_hidden_state_layer_ids"] = list(config.aux_hidden_state_layer_ids)
    own = {"k_train": config.k_train, "target": target_name}
    if layout == "native":
        raw = {"architectures": [NATIVE_ARCHITECTURE], **layer_config(config), **common, "peagle": own}
        if config.kind == "p-eagle":
            raw |= {"parallel_drafting": True, "ptd_token_id": config.mask_token_id}
        return raw
    name = "peagle" if config.kind == "p-eagle" else "eagle3"
    # vLLM reads these two of a peagle head from the layer config only
    norms = {"fc_norm": config.fc_norm, "norm_output": config.norm_output}
    raw = {
        "architectures": ["PEagleSpeculator" if name == "peagle" else "Eagle3Speculator"],
        "speculators_model_type": name,
        "speculators_version": "0.9.0",
        "transformer_layer_config": layer_config(config) | norms,
        "speculators_config": {
            "algorithm": name,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.k_train or 5}],
            "verifier": {"name_or_path": target_name, "architectures": []},
        },
        **common,
        "peagle": own,
    }
    if config.kind == "p-eagle":
        raw["mask_token_id"] = config.mask_token_id
    return raw


def checkpoint_tensors(drafter: Drafter, layout: Layout, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The tensors to write, under the layout's names, on the CPU."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in drafter.state_dict().items():
        if layout == "native":
            name = name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name
        tensor = tensor.detach().cpu()
        tensors[name] = (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous().clone()
    if drafter.d2t is not None:
        tensors["t2d"] = t2d_of(drafter.d2t, drafter.config.vocab_size)
        if drafter.lm_head is None:
            # vLLM can share a target's whole LM head but not some of its rows, so those go into the file
            tensors["lm_head.weight"] = drafter.lm_head_weight().detach().cpu().to(dtype).contiguous().clone()
    return tensors


def save_drafter(
    drafter: Drafter, path: str | os.PathLike[str], layout: Layout = "native", target_name: str = ""
) -> Path:
    """Write a head's folder, whole or not at all: it is filled beside its place and moved there when complete.

    Files of the folder that are not the head's own (a model card) stay.
    """
    final = Path(path).expanduser()
    config = replace(drafter.config, dtype="bfloat16")
    if drafter.d2t is not None and drafter.lm_head is None and not drafter.bound:
        raise InputError("lm_head: a head with a reduced vocabulary and no LM head of its own, expected a bound target")
    work: Path | None = None
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
        save_file(checkpoint_tensors(drafter, layout), work / "model.safetensors", metadata={"format": "pt"})
        os.chmod(work / "model.safetensors", 0o644)  # safetensors writes 0600
        text = json.dumps(config_json(config, layout, target_name), indent=2, sort_keys=True)
        (work / "config.json").write_text(text + "\n")
        if not final.is_dir():
            os.chmod(work, 0o755)
            work.rename(final)
        else:
            os.replace(work / "model.safetensors", final / "model.safetensors")
            os.replace(work / "config.json", final / "config.json")
            for stale in (*final.glob("*.safetensors"), *final.glob("*.safetensors.index.json")):
                if stale.name != "model.safetensors":
                    stale.unlink()
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
        raise InputError(f"output: {final} cannot be written ({error})") from error
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
    return final


def fit_problems(config: DrafterConfig, *, vocab_size: int, hidden_size: int, num_layers: int) -> list[str]:
    """Why a head does not fit a target, each with the key and both values; empty when it fits."""
    problems = []
    if config.target_hidden_size != hidden_size:
        problems.append(f"head: target_hidden_size {config.target_hidden_size}, but the target's is {hidden_size}")
    if config.vocab_size != vocab_size:
        problems.append(f"head: vocab_size {config.vocab_size}, but the target's is {vocab_size}")
    if config.hidden_size != hidden_size and not (config.own_embed_tokens and config.own_lm_head):
        problems.append(
            f"head: hidden_size {config.hidden_size} differs from the target's {hidden_size}, so it cannot share the "
            "target's embeddings or LM head, and it brings none of its own"
        )
    try:
        ids = with_aux_layers(config, num_layers)[0].aux_hidden_state_layer_ids
    except InputError as error:
        return [*problems, f"head: {error}"]
    if max(ids) >= num_layers:
        problems.append(f"head: eagle_aux_hidden_state_layer_ids {list(ids)}, but the target has {num_layers} layers")
    return problems


def check_fits(config: DrafterConfig, *, vocab_size: int, hidden_size: int, num_layers: int) -> None:
    """Refuse a head that was made for another target, naming the key and both values."""
    for problem in fit_problems(config, vocab_size=vocab_size, hidden_size=hidden_size, num_layers=num_layers):
        raise InputError(problem)
