"""Writes the table of rules into a page: `python -m pacecar.doctor docs/doctor.md`."""

import sys
from pathlib import Path

from pacecar.doctor.reference import renew

if len(sys.argv) != 2:
    sys.exit("usage: python -m pacecar.doctor PAGE")
try:
    renew(Path(sys.argv[1]))
except (OSError, ValueError) as error:
    sys.exit(str(error))
