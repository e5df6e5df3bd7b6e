"""Turns the knobs of a running job, and undoes it.

Input: a knob and a value.  Output: the changed job.  Start with `actuator`, the interface of every knob.

    ddp                       buckets and compression
    dataloader                workers and prefetch
    batch                     micro-batches and the global batch
    activation_checkpointing  which blocks compute their activations again in backward
    fsdp2                     when FSDP2 gathers parameters
    deepspeed_zero            the two sizes that ZeRO reads in each step
    garbage_collection        when Python collects garbage
    memory_limit              whether what a knob would take fits

To add a knob, in this order (records, commands, labels, pages and dashboards take it from `pacecar/knobs.py`):

1. `pacecar/knobs.py`: its name in `KnobName` and a row in `KNOBS`, at the same place: class, kind, help.  It is on by
   default, so its `refusal` must name every job in which it does nothing.  There are as many knobs as `KNOBS_MAX` of
   `controller/consensus/protocol.py` allows: raise it, and `VERSION` there, because the ranks' vector grows.
2. `pacecar/config.py`: its bounds in `TuneConfig`, if any: `<knob>_min` and `<knob>_max`.
3. In the folder of what it turns, or a module here if there is none: a subclass of `Actuator`.  `apply` is all or
   nothing.  Override `layout` if ranks must be alike, and `companions` if a value only costs alone.  A row in the
   folder's docstring, or in this one.
4. `pacecar/torch_internals.py`: a row for each private name of torch that it uses.
5. Where its folder creates knobs: `DdpKnobs`, `LoaderKnobs`, `open_checkpointed_blocks`, `fsdp_knobs`, `zero_knobs` or
   `gc_knobs`.  Only a knob of another kind needs a line in `JobKnobs.__init__` and `JobKnobs.actuators` of
   `job/tuner_wiring.py`.
6. `controller/forecast/gain_model.py`: its expected gain, if computable; else `PRIOR_GAIN` in
   `controller/policy/geometric_search.py`, which only orders trials.
7. `docs/configuration.md` (both cells of the row `knobs`, and the bounds in the order of the fields) and the table of
   knobs in `docs/tuning.md`.
8. `tests/controller/`: `job_<knob>.py`, run by `tests.kit.rank_jobs`, and `test_<knob>.py` on real processes.
   Gradients before and after a switch are equal to the last bit, or except for the order of summation (model: FSDP's).
9. If it needs only torch: a column in `FEATURES` of `tests/compatibility/table.py`, and its cell in
   `tests/compatibility/run.py`: in `TURNED` if `tests/compatibility/job.py` can turn it, else a job of its own.
10. `make compatibility` (an hour; `TORCH=2.13.0` runs one row) writes the rows of what ran in
    `tests/compatibility/ran/` and `tests/adapters/ran/`, and `docs/compatibility.md`.  Plain loops:
    `RECORD_COMPATIBILITY=1 .venv/bin/python -m pytest tests/adapters/test_plain_loops.py -k table`.
    `.venv/bin/python tests/adapters/compatibility.py` writes the page again.
"""
