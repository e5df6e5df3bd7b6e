"""Runs `pacecar demo`: a real training run with pacecar attached; see ARCHITECTURE.md.

Its processes talk by records only: `processes` starts a daemon and a torchrun of `train`, and everything that the demo
shows or writes it reads from the records that the job left in the run folder, as any other reader could.  It ends with
the tables of `pacecar report`, from the same code.  Start with `run_demo`.  `processes` is the only place in pacecar
that starts programs.
"""
