"""Puts together what measures and tunes a training process, for `pacecar.attach` and `pacecar run`.

In come the script's model, optimizer and options; out goes a `Pacer` that measures every step and may turn knobs.
Start with `attach`.  `wiring` lists the parts of a job, `tuner_wiring` those of the tuner; `autoattach` and `startup`
serve `pacecar run`.
"""
