"""Builds what measures and tunes a training process, for `pacecar.attach` and `pacecar run`.

Input: the script's model, optimizer and options.  Output: a `Pacer` that measures every step and may turn knobs.  Start
with `attach`, which checks the arguments.  `wiring` builds the parts of a job, `tuner_wiring` those of the tuner.
`handle` is the object that the script gets; it needs the standard library only.  `startup` and `autoattach` serve
`pacecar run`.

A caller's mistake raises at once; a problem in the environment makes the pacer inert.
"""
