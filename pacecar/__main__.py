"""Runs the `pacecar` command as `python -m pacecar`, for launchers that know only their interpreter."""

from pacecar.commands.main import main

if __name__ == "__main__":
    main()
