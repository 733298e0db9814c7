"""`dataset.json` of a folder of answers: for which target, its tokenizer and its chat template they are."""

import hashlib
import json
from pathlib import Path
from typing import Any

from peagle.errors import InputError

FORMAT_VERSION = 1
METADATA_FILE = "dataset.json"


def read_metadata(folder: Path) -> dict[str, Any]:
    """`dataset.json` of a folder.

    Raises:
        InputError: it is missing, unreadable, of another format version, or lacks the target's facts.
    """
    file = folder / METADATA_FILE
    if not file.is_file():
        raise InputError(f"{folder}: no {METADATA_FILE} in it; expected a folder written by `peagle data generate`")
    try:
        metadata = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: not JSON: {error}") from error
    version = metadata.get("format_version") if isinstance(metadata, dict) else None
    if version != FORMAT_VERSION:
        raise InputError(f"{file}: format_version is {version!r}, expected {FORMAT_VERSION}")
    target = metadata.get("target")
    for key in ("name", "vocab_size", "tokenizer", "chat_template"):
        if not isinstance(target, dict) or key not in target:
            raise InputError(f"{file}: target.{key} is missing")
    return dict(metadata)


def check_same_target(metadata: dict[str, Any], expected: dict[str, Any], where: str, expected_where: str) -> None:
    """Raise InputError unless both data sets are written in the same tokenizer's ids."""
    mine, other = metadata["target"], expected["target"]
    if (mine["tokenizer"], mine["vocab_size"]) != (other["tokenizer"], other["vocab_size"]):
        raise InputError(f"{where} was made with {mine['name']}, {expected_where} with {other['name']}: two tokenizers")


def target_facts(name: str, tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """The `target` entry of `dataset.json`."""
    return {
        "name": name,
        "vocab_size": vocab_size,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "chat_template": template_fingerprint(tokenizer),
    }


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash of which text each token id stands for; independent of special-token settings and of the file layout."""
    digest = hashlib.sha256()
    for text, token in sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{token}\0{text}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:32]


def template_fingerprint(tokenizer: Any) -> str:
    """Hash of the chat template's text."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return hashlib.sha256(json.dumps(template).encode()).hexdigest()[:32]
