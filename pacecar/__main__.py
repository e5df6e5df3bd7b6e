"""`python -m pacecar`: the command without an installed script, for launchers that know only their interpreter."""

from pacecar.commands.main import main

if __name__ == "__main__":
    main()
