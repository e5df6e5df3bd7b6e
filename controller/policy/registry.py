"""Makes the policy that the user named in the configuration."""

from __future__ import annotations

from pacecar.config import TuneConfig

from ..observation import Policy
from .tuning_policy import TuningPolicy

__all__ = ["make_policy"]


def make_policy(config: TuneConfig) -> Policy:
    """Return a fresh policy of the kind `config.policy`.

    Raises:
        ConfigError: the policy needs a library that is not installed.
    """
    if config.policy == "pacecar":
        return TuningPolicy(config)
    from ..baselines.registry import make_baseline  # most jobs never load these

    return make_baseline(config)
