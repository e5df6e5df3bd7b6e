"""Tunes a running job: forecasts settings, tests them by A/B trials, and keeps those that are proven faster.

Finished steps, node signals and people's commands come in; records and knob changes, which all ranks make at the same
step, go out.  Start with `tuner` (one rank's part) and `policy.tuning_policy` (the decisions); see ARCHITECTURE.md.

    policy/           what to try, and when                 observation       what a policy receives and returns
    experiment/       one trial, its test, its budget       command_handler   executes people's commands
    forecast/         what a change should gain             status_reporter   what one rank's tuner did and does
    guards/           pause, or take a change back          restart_advice    what the tuner may not do, in words
    consensus/        all ranks, or none
    knobs/            how a knob is turned                  memory_advice     what a restart could free, in words
    memory/           what earlier runs found               training_memory   reads what memory_advice is about
                                                            foreach_ops       norms of many tensors in one call

Most of it is pure and can be replayed; the edges are `tuner`, `consensus`, `knobs`, `memory.store_thread` and
`guards.loss_monitor`.
"""
