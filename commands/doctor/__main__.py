"""Writes the table of rules into a page: `python -m pacecar.commands.doctor docs/doctor.md`."""

import sys
from pathlib import Path

from .reference import renew

if len(sys.argv) != 2:
    sys.exit("usage: python -m pacecar.commands.doctor PAGE")
try:
    renew(Path(sys.argv[1]))
except (OSError, ValueError) as error:
    sys.exit(str(error))
