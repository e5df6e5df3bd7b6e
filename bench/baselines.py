"""Makes the other tuners that pacecar's policy is compared with, and lets one of them tune a job.

They are policies built on the product's `SamplerPolicy`.  The product does not offer them, because a search that
neither tests its result nor ends a bad trial does not serve users.
"""

from __future__ import annotations

from pacecar.config import TuneConfig
from pacecar.controller.policy.sampler_policy import SamplerPolicy, SettingSampler

__all__ = ["BASELINES", "make_baseline", "tune_by"]

BASELINES = ("gaussian-process", "tpe")


def make_baseline(name: str, config: TuneConfig, *, seed: int = 0) -> SamplerPolicy:
    """Return a new baseline of that name; `seed` is for those that draw.

    Raises:
        ValueError: unknown name.
    """
    sampler: SettingSampler
    if name == "gaussian-process":
        from bench.gaussian_process import GaussianProcessSampler

        sampler = GaussianProcessSampler()
    elif name == "tpe":
        from bench.tpe import TpeSampler  # here, because Optuna takes a second to import

        sampler = TpeSampler(seed=seed)
    else:
        raise ValueError(f"{name!r} is not a baseline; choose from {', '.join(BASELINES)}")
    return SamplerPolicy(config, sampler, name=name)


def tune_by(name: str) -> None:
    """Let the baseline `name` tune what this process attaches from now on, in place of the configured policy.

    Attach with `remember=False`: what a baseline keeps is not proven.
    """
    from pacecar.controller import command_handler  # needs torch, which replays do without

    make_baseline(name, TuneConfig())  # so that its libraries are loaded before the first step
    command_handler.make_policy = lambda config: make_baseline(name, config)
