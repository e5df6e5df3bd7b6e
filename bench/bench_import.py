"""Measures the time of `import pacecar` and others in fresh interpreters, by their own clock."""

from __future__ import annotations

import statistics
import subprocess
import sys

ROUNDS = 11


def import_us(statement: str, module: str) -> int:
    """Return the microseconds that importing `module` took, all that it imports included."""
    command = [sys.executable, "-X", "importtime", "-c", statement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    (line,) = [line for line in done.stderr.splitlines() if line.split("|")[-1].strip() == module]
    return int(line.split("|")[1])


def main() -> None:
    for statement, module in (
        ("import pacecar", "pacecar"),
        ("import pacecar.commands.main", "pacecar.commands.main"),
        ("import pacecar.monitor.daemon", "pacecar.monitor.daemon"),
    ):
        costs = [import_us(statement, module) for _ in range(ROUNDS)]
        sys.stdout.write(
            f"{statement:<32} {statistics.median(costs) / 1000:8.2f} ms   (least {min(costs) / 1000:.2f})\n"
        )


if __name__ == "__main__":
    main()
