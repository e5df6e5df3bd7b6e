"""What `pacecar.attach` puts together in a training process.

In come the script's model, optimizer and options; out goes a `Pacer` that measures every step and may turn knobs.
Start with `attach`; `wiring` lists the parts of a job, `tuner_wiring` those of the tuner; `autoattach` is `pacecar run`.
"""
