"""Makes the policy that the user named in the configuration."""

from __future__ import annotations

from pacecar.config import TuneConfig

from ..observation import Policy
from .tuning_policy import TuningPolicy

__all__ = ["make_policy"]


def make_policy(config: TuneConfig) -> Policy:
    """Return a fresh policy of the kind `config.policy`."""
    if config.policy == "pacecar":
        return TuningPolicy(config)
    from .sampler_policy import SamplerPolicy  # most jobs never load these
    from .throughput_doubling import DoublingSampler

    return SamplerPolicy(config, DoublingSampler(), name=config.policy)
