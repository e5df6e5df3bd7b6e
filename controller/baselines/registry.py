"""Makes the baseline policy of a given name: its sampler inside the `SearchPolicy` that all baselines share."""

from __future__ import annotations

from pacecar.config import TuneConfig

from .search import SearchPolicy, SettingSampler

__all__ = ["make_baseline"]


def make_baseline(config: TuneConfig, *, seed: int = 0) -> SearchPolicy:
    """Return a fresh baseline of the kind `config.policy`; `seed` is for those that draw.

    Raises:
        ConfigError: the policy needs a library that is not installed.
        ValueError: there is no baseline of that name.
    """
    sampler: SettingSampler
    if config.policy == "throughput-doubling":
        from .doubling import DoublingSampler

        sampler = DoublingSampler()
    elif config.policy == "gaussian-process":
        from .gaussian_process import GaussianProcessSampler

        sampler = GaussianProcessSampler()
    elif config.policy == "tpe":
        from .tpe import TpeSampler

        sampler = TpeSampler(seed=seed)
    else:
        raise ValueError(f"{config.policy!r} is no baseline")
    return SearchPolicy(config, sampler, name=config.policy)
