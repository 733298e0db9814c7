"""The drafter head: its network, its config and its checkpoint."""

from peagle.drafter.checkpoint import check_fits, load_drafter, save_drafter
from peagle.drafter.config import DrafterConfig
from peagle.drafter.model import Drafter

__all__ = ["Drafter", "DrafterConfig", "check_fits", "load_drafter", "save_drafter"]
