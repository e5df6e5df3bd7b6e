"""Runs `pacecar demo`: a real training run with pacecar attached.

`run_demo` is the command.  `processes` starts a daemon and a torchrun of `train`, and is the only place in pacecar that
starts programs.  What the demo shows meanwhile (`progress`) it reads from the records that the job writes into its run
folder, as any other reader could.  What it shows at the end is the report of that folder, built by
`pacecar.commands.report`.
"""
