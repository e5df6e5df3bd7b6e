"""The main job: a real training run with pacecar attached, started by `pacecar demo`; see ARCHITECTURE.md.

Three processes and no back channels: `launch` starts a daemon and a torchrun of `train`, and everything it shows or
writes it reads from the records that the job left in the run folder, as any other reader could.
"""
