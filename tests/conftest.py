"""What holds for all tests: none learns from another, or from what its user trained yesterday.

And how fast the machine is decides nothing.
"""

from __future__ import annotations

import os
import signal
import tempfile

from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.kit.garbage", "tests.kit.selection"]

# Threads of one operator spin while they wait for each other: beside others a small model takes ten times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PACECAR_TUNE_REMEMBER", "false")
_STATE = tempfile.TemporaryDirectory(prefix="pacecar-tests-")
os.environ["STATE_DIRECTORY"] = _STATE.name  # where daemons, also those of child processes, write recordings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell without job control starts what it puts in the background like this, and our scripts would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("pacecar", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pacecar")
