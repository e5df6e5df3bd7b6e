"""Knows which versions of each library the tests ran; outside of these a job is measured all the same, and not tuned.

A trainer's loop is not a public interface: which attribute says that an update is complete, and who divides the loss,
changes between minor versions.  A knob that reads it wrongly would train another model without a word, so outside the
range nothing is turned.  Measuring only needs torch's own hooks.

Left out: torch, whose private parts are probed where they are used (`controller/knobs/ddp/torch_internals`).
"""

from __future__ import annotations

from importlib import metadata

from pacecar.version_numbers import major_minor

__all__ = ["TESTED", "untested"]

TESTED: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "transformers": ((5, 23), (5, 23)),
    "accelerate": ((1, 15), (1, 15)),
    "lightning": ((2, 6), (2, 6)),
    "deepspeed": ((0, 19), (0, 19)),
    "ray": ((2, 60), (2, 60)),
}
"""Library -> first and last minor version, both included: what `requirements/adapters.txt` was when tests passed."""


def untested(library: str, version: str | None = None) -> str | None:
    """Return why `library` must not be tuned in this version (by default the installed one), or None."""
    if version is None:
        try:
            version = metadata.version(library)
        except metadata.PackageNotFoundError:
            return f"the version of {library} is unknown"
    found = major_minor(version)
    first, last = TESTED[library]
    if found is not None and first <= found <= last:
        return None
    low, high = (".".join(map(str, bound)) for bound in (first, last))
    return f"{library} {version} is outside the tested versions {low if low == high else f'{low} to {high}'}"
