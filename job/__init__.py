"""Puts together what measures and tunes a training process, for `pacecar.attach` and `pacecar run`.

In come the script's model, optimizer and options; out goes a `Pacer` that measures every step and may turn knobs.
Start with `attach`, which checks them.  `wiring` builds the parts of a job, `tuner_wiring` those of the tuner;
`handle` is the object that the script gets, and needs the standard library alone.  `startup` and `autoattach` serve
`pacecar run`.

What a caller typed wrongly raises at once; what is wrong with the world makes the pacer inert.
"""
