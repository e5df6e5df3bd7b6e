"""Defines the command line: `main` lists the commands, and each command is a module or a folder here.

A command turns arguments into text, JSON and an exit code; what it computes lives in the rooms below.

    a run        report/              a machine    doctor/, sample_text    a network    bench/
    a node       top/, dump, health   a job        job, tune, knobs        traces       analyze
    a start      run, demo/           installing   deploy, man_pages, dashboards

`main` itself has `daemon`, `sample`, `trace` and `version`.  Shared: `shared_options`, `help_text` (help under
`python -OO`), `daemon_client` (the daemon's socket), `tune_text` and `job_text` (what `tune` and `job` print).
"""
