"""`python -m pacecar`: the command without an installed script, for launchers that know only their interpreter."""

from pacecar.cli import main

if __name__ == "__main__":
    main()
