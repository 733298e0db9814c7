"""The flag `--target-device-map`, which several commands have."""

from typing import Annotated

import typer

TargetDeviceMap = Annotated[
    str | None,
    typer.Option(
        help="Spread the target over this process's GPUs: auto, balanced, balanced_low_0, sequential, or a JSON "
        "object from modules to devices."
    ),
]
