"""Rules for an overloaded machine, on which the job waits for processors, memory or disks.

In a ledger, this loss looks like slow Python, a slow disk or a straggler, and the remedies for those would be wrong;
the job's rules check `is_crowded`.  Evidence is the load and pressure of the last minutes, and the job's own ranks and
threads on this machine.  A running job uses the same rule for processors (`pacecar.kernel_files.processors`).
"""

from __future__ import annotations

from pacecar.formatting.quantities import plural
from pacecar.kernel_files.processors import are_processors_contended, do_ranks_exceed, do_threads_exceed, openmp_threads

from ..facts.evidence import FindingEvidence
from ..facts.model import NodeFacts, Seen
from ..findings import FindingSource, Hit, Rule, Severity
from ..sources import TORCH
from ..transport_paths import is_local_run, local_gain, local_ranks

__all__ = ["RULES", "is_crowded"]

MEMORY_PRESSURE_MIN = 0.01
"""Share of time in which all tasks waited for memory at once.  No work is done then, so one percent is a lot."""

IO_PRESSURE_MIN = 0.10
"""Share of time in which all tasks waited for a disk at once."""

_PSI = FindingSource("Linux kernel", "accounting/psi.rst, Pressure interface")


def _share(seen: Seen[float], what: str) -> FindingEvidence:
    return seen.as_evidence(what, f"{seen.value:.0%} of the last minute")


def _processors(facts: NodeFacts) -> FindingEvidence:
    limited = "" if facts.cpus.usable == facts.cpus.count else f" of {facts.cpus.count}, by the control group's limit"
    return FindingEvidence("processors", f"{facts.cpus.usable}{limited}", "/proc/cpuinfo")


def _cpu(facts: NodeFacts) -> Hit | None:
    load, pressure, count = facts.cpus.load, facts.cpus.pressure.cpu, facts.cpus.count
    if not are_processors_contended(
        pressure=None if pressure is None else pressure.value, load=None if load is None else load.value, count=count
    ):
        return None
    evidence = [] if pressure is None else [_share(pressure, "tasks waited for a processor")]
    if load is not None:
        evidence.append(load.as_evidence("load over five minutes", f"{load.value:g}"))
    if count is not None:
        evidence.append(_processors(facts))
    return Hit(evidence, "ps -eo pid,user,pcpu,comm --sort=-pcpu | head    # end or move what is not the job")


def _memory(facts: NodeFacts) -> Hit | None:
    pressure = facts.cpus.pressure.memory
    if pressure is None or pressure.value < MEMORY_PRESSURE_MIN:
        return None
    return Hit(
        (_share(pressure, "all tasks waited for memory"),),
        "ps -eo pid,user,rss,comm --sort=-rss | head    # fewer loader workers, a smaller prefetch_factor or cache",
    )


def _io(facts: NodeFacts) -> Hit | None:
    pressure = facts.cpus.pressure.io
    if pressure is None or pressure.value < IO_PRESSURE_MIN:
        return None
    return Hit(
        (_share(pressure, "all tasks waited for a disk"),),
        "iostat -x 5    # which disk; then cache the data in memory, or read it from a faster one",
        local_gain(facts, "data_free"),
    )


def _threads(facts: NodeFacts) -> Hit | None:
    seen = facts.settings.get("OMP_NUM_THREADS")
    threads = openmp_threads(None if seen is None else seen.value)
    usable, ranks = facts.cpus.usable, max(local_ranks(facts), 1)
    if seen is None or usable is None or not do_threads_exceed(threads=threads, ranks=ranks, usable=usable):
        return None
    evidence = [seen.as_evidence("OMP_NUM_THREADS"), _processors(facts)]
    if ranks > 1 and facts.run is not None:
        evidence.append(FindingEvidence("ranks on this machine", str(ranks), facts.run.where))
    return Hit(evidence, f"export OMP_NUM_THREADS={max(usable // ranks, 1)}")


def _ranks(facts: NodeFacts) -> Hit | None:
    run, usable = facts.run, facts.cpus.usable
    if run is None or usable is None or not is_local_run(facts):
        return None
    here = [hello for hello in run.hellos if hello.host == facts.host and hello.device == "cpu"]
    if not do_ranks_exceed(ranks=len(here), usable=usable):
        return None
    ranks = FindingEvidence(
        "ranks that compute on processors", f"{plural(len(here), 'rank')} on {facts.host}", run.where
    )
    return Hit(
        (ranks, _processors(facts)), f"torchrun --nproc-per-node {usable} ...    # no more than there are processors"
    )


def is_crowded(facts: NodeFacts) -> bool:
    """Return whether the run was on this machine and waited, or would now wait, for processors."""
    return is_local_run(facts) and any(check(facts) is not None for check in (_cpu, _threads, _ranks))


RULES = (
    Rule("cpu-contended", Severity.WARNING, "More tasks want to run than there are processors",
         "a step waits for each of its threads, and a rank that waits for a processor delays all others", "machine",
         _PSI, _cpu),
    Rule("memory-pressure", Severity.WARNING, "All tasks wait for memory",
         "pages are written out and read again, perhaps those of the job", "machine", _PSI, _memory),
    Rule("io-pressure", Severity.WARNING, "All tasks wait for a disk",
         "loader workers and checkpoints wait for the disk, whatever keeps it busy", "machine", _PSI, _io),
    Rule("cpu-omp-threads", Severity.WARNING, "There are more OpenMP threads than processors",
         "an operator ends with its last thread, so threads that share a processor wait for each other every time",
         "machine", TORCH.at("CPU threading and TorchScript inference, Tuning the number of threads"), _threads),
    Rule("cpu-oversubscribed", Severity.WARNING, "More ranks compute on processors than there are processors",
         "ranks take turns, and each collective waits for the last one", "--run",
         TORCH.at("torchrun (Elastic Launch), --nproc-per-node"), _ranks),
)  # fmt: skip
