"""Defines the command line: `main` names the commands, and each command is a module or a folder here.

In come arguments, out go text, JSON and exit codes; what a command computes lives in the rooms below.
Start with `main`; what several commands share is in `shared_options` (options), `help_text` (help under `python -OO`)
and `daemon_client` (the daemon's socket).

    of a run        report/          of a machine    doctor/, sample_text       of a network    bench/
    of a node       top/, dump, health       of a job        tune, knobs                of traces       analyze
    to start        run, demo/       to install      deploy, man_pages, dashboards

`main` itself has `daemon`, `sample`, `trace` and `version`.
"""
