"""Where the modules of a target lie that one process spreads over several devices."""

from __future__ import annotations

import json
import re
from typing import Any

from peagle.errors import InputError

PLANS = ("auto", "balanced", "balanced_low_0", "sequential")  # Transformers' own
DeviceMap = str | dict[str, str | int]


def parse_device_map(value: Any, name: str = "target_device_map") -> DeviceMap | None:
    """The name of a plan, or module names -> cpu, a GPU's number or cuda:N; an object may come as JSON text.

    None stays None. Raises InputError, naming the setting `name`.
    """
    if value is None or value in PLANS:
        return value
    expected = f'expected one of {", ".join(PLANS)}, or a JSON object such as {{"model.layers.0": 0, "lm_head": "cpu"}}'
    places = value
    if isinstance(value, str):
        try:
            places = json.loads(value)
        except json.JSONDecodeError:
            places = None
    if not isinstance(places, dict) or not places:
        raise InputError(f"{name}: got {value!r}, {expected}")
    for module, place in places.items():
        number = isinstance(place, int) and not isinstance(place, bool) and place >= 0
        if not number and not (isinstance(place, str) and re.fullmatch(r"cpu|cuda:\d+", place)):
            raise InputError(f"{name}: {module!r} is to lie on {place!r}, expected cpu, a GPU's number or cuda:N")
    return places
