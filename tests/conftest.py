"""What holds for all tests: none learns from another, or from what its user trained yesterday.

And how fast the machine is decides nothing.
"""

from __future__ import annotations

import os
import tempfile

from hypothesis import HealthCheck, settings

os.environ.setdefault("PACECAR_TUNE_REMEMBER", "false")
_STATE = tempfile.TemporaryDirectory(prefix="pacecar-tests-")
os.environ["STATE_DIRECTORY"] = _STATE.name  # where daemons, also those of child processes, write recordings

settings.register_profile("pacecar", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pacecar")
