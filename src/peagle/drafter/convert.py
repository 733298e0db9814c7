"""A head from one layout to the other, without loss: every tensor keeps its bits, only names and the config change, and
the config comes back as it was."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor

from peagle.drafter.config import DrafterConfig
from peagle.drafter.config_keys import Layout, config_layout
from peagle.drafter.facts import named_target
from peagle.drafter.head_folder import check_apart, check_replaceable
from peagle.drafter.layouts import config_json, module_name, parse_config
from peagle.drafter.loading import load_drafter, read_json, read_tensors, resolve_head
from peagle.drafter.saving import t2d_of, write_files
from peagle.errors import InputError
from peagle.work_folder import work_folder

# Files that belong to a head in any layout and are not copied: they are written anew.
WRITTEN = ("config.json", "*.safetensors", "*.safetensors.index.json")
SOURCE = "peagle_source_config"  # in a converted config.json: the config in the other layout that it was made from


def layout_name(name: str, layout: Layout) -> str:
    """A tensor's name in a layout, from its name in either."""
    name = module_name(name)
    if layout == "native" and name.startswith("layers.0."):
        return name.replace("layers.0.", "midlayer.", 1)
    return name


def converted_tensors(tensors: dict[str, Tensor], layout: Layout, config: DrafterConfig) -> dict[str, Tensor]:
    """The same tensors under the layout's names.

    A missing t2d is made from d2t, which says the same. Where the draft vocabulary is the whole one both map every id
    to itself, as loading has checked, and are left out: vLLM 0.30 and later do not load a head that has them.
    """
    converted = {layout_name(name, layout): tensor.contiguous() for name, tensor in tensors.items()}
    if not config.reduced_vocab:
        return {name: tensor for name, tensor in converted.items() if name not in ("d2t", "t2d")}
    if "d2t" in converted and "t2d" not in converted:
        converted["t2d"] = t2d_of(converted["d2t"], config.vocab_size)
    return converted


def convert_head(
    head: str | os.PathLike[str], output: str | os.PathLike[str], layout: Layout, force: bool = False
) -> Path:
    """Write `head` (a folder or a Hub id) to the folder `output` in a layout, whole or not at all.

    The head is loaded first, so that what does not work is refused and not converted. Other files of the folder (a
    model card) are copied. An existing output is refused, or with `force` replaced as a whole where it is a head's and
    holds nothing else. Raises InputError.
    """
    if layout not in ("native", "speculators"):
        raise InputError(f"--layout: got {layout!r}, expected native or speculators")
    source = resolve_head(head)
    final = Path(output).expanduser()
    if final.exists() and not force:
        raise InputError(f"output: {final} exists, expected a new folder (or --force to replace it)")
    check_apart(source, final)
    if final.exists():
        check_replaceable(final, source)
    loaded = load_drafter(source)
    raw = read_json(source / "config.json")
    tensors = converted_tensors(read_tensors(source), layout, loaded.config)
    written = converted_config(raw, layout, loaded.config.dtype)
    del loaded
    with work_folder(final, f"output: {final} cannot be written") as work:
        for file in sorted(source.iterdir()):
            if file.is_file() and not any(fnmatchcase(file.name, pattern) for pattern in WRITTEN):
                shutil.copyfile(file, work / file.name)
        write_files(work, tensors, written)
        os.chmod(work, 0o755)
        if final.exists():  # once more: converting takes a while
            check_replaceable(final, source)
        put_in_place(work, final)
    return final


def converted_config(raw: dict[str, Any], layout: Layout, dtype: str) -> dict[str, Any]:
    """`config.json` in a layout, from a valid one in either; dtype is the tensors', by torch's name.

    Nothing is lost of what the other layout has no key for: where the new config does not say it all, the old one lies
    whole in it as `SOURCE`, which readers of heads ignore, and comes back on the way back, with what has been changed
    in between. In its own layout a config stays as it is.
    """
    before = config_layout(raw)
    if before == layout:
        return raw
    written = in_layout(raw, layout, dtype)
    back = in_layout(written, before, dtype)
    source = raw.get(SOURCE)
    if isinstance(source, dict) and understood(source) is not None and config_layout(source) == layout:
        restored = with_changes(source, in_layout(source, layout, dtype), written)
        # keys of other makers that mean the same may hide a change: then only what is read comes over
        if understood(restored) == understood(raw):
            written, back = restored, converted_config(restored, before, dtype)
    return written if same_json(back, raw) else {**written, SOURCE: raw}


def in_layout(raw: dict[str, Any], layout: Layout, dtype: str) -> dict[str, Any]:
    """What a config in either layout says of a head, in a layout, and nothing else."""
    return config_json(replace(parse_config(raw), dtype=dtype), layout, named_target(raw))


def understood(raw: dict[str, Any]) -> tuple[DrafterConfig, str] | None:
    """What is read of a config; None where it is not one."""
    try:
        return parse_config(raw), named_target(raw)
    except InputError:
        return None


def with_changes(source: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """`source` with the changes that lead from `before` to `after`, in objects within it too."""
    result = dict(source)
    for key in before.keys() | after.keys():
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict) and isinstance(source.get(key), dict):
            result[key] = with_changes(source[key], old, new)
        elif key in after:
            result[key] = new
        else:
            result.pop(key, None)
    return result


def same_json(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two objects are written alike, 1 and 1.0 told apart; the order of keys is free."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def put_in_place(work: Path, final: Path) -> None:
    """Move a complete folder to its name; a head that stood there is taken away only once the new one stands."""
    if not final.exists():
        work.rename(final)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{final.name}.old.", dir=final.parent))
    final.rename(old / "head")
    try:
        work.rename(final)
    except OSError:
        (old / "head").rename(final)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)
