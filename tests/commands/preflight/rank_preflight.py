"""One rank of `pacecar preflight`: `rank_preflight.py FOLDER OPTION...`, each rank a node of its own.

It leaves its process id in FOLDER and begins when whoever started it has made FOLDER/go, so that it can be limited: in
a network namespace it does not see control groups itself. With FOLDER/stop<rank> it stops itself after two seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from pacecar.commands.main import main

folder, rank = Path(sys.argv[1]), os.environ["RANK"]
(folder / f"new{rank}").write_text(str(os.getpid()))
(folder / f"new{rank}").rename(folder / f"pid{rank}")
while not (folder / "go").exists():
    time.sleep(0.02)
if (folder / f"stop{rank}").exists():
    threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGSTOP)).start()
os.environ |= {"GROUP_RANK": rank, "LOCAL_RANK": "0"}
sys.argv[1:2] = ["preflight"]
main()
