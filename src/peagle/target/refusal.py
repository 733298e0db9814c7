"""What our engine says of a model before gigabytes of weights are read."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from peagle.errors import InputError
from peagle.target.loading import reason
from peagle.target.model import Target


def engine_refusal(config: Any, name: str) -> str | None:
    """Why our engine does not run a model of this Transformers config; None where it does.

    The model is built on the meta device, without weights, and meets the checks that a loaded one meets on its way into
    the engine.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # not a causal language model, or a package that its code needs is missing
        return f"model: {name!r} could not be loaded ({reason(error)})"
    try:
        Target(model, None, name).check_paged()
    except InputError as error:
        return str(error)
    return None
