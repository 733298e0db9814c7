"""The drafter head: its network, its config and its checkpoint."""

from peagle.drafter.config import DrafterConfig
from peagle.drafter.fit import check_fits
from peagle.drafter.loading import load_drafter
from peagle.drafter.model import Drafter
from peagle.drafter.saving import save_drafter

__all__ = ["Drafter", "DrafterConfig", "check_fits", "load_drafter", "save_drafter"]
