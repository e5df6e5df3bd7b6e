"""The doctor finds exactly the planted fault, with evidence, and nothing on healthy machines."""

from __future__ import annotations

from collections import Counter

import pytest

from pacecar.commands.doctor.findings import Severity
from pacecar.commands.doctor.rules.registry import RULES, judge
from tests.commands.doctor.faults import FAULTS, Fault, both, job, load, on_processors, pressure, variable
from tests.commands.doctor.machine import MS, PID, h100_node, no_gpu, tcp_node, workstation
from tests.kit.machines import Site

BY_ID = {rule.id: rule for rule in RULES}
HEALTHY = {"h100": h100_node, "tcp": tcp_node, "workstation": workstation, "no gpu": no_gpu}


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    """Machine -> the folder in which its faults are planted one after the other."""
    return {machine: Site(tmp_path_factory.mktemp("site")) for machine in HEALTHY.values()}


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("is_bare", [False, True], ids=["with its job", "bare"])
def test_nothing_is_found_on_a_healthy_machine(name, is_bare, sites):
    machine = HEALTHY[name]()
    if is_bare:
        machine.run = machine.script = machine.log = machine.pid = None
    facts = machine.collect_facts(sites[HEALTHY[name]])
    judgement = judge(facts)
    assert [finding.id for finding in judgement.findings] == []
    assert facts.unreadable == ()
    assert judgement.failed == ()


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{n}-{fault.rule}" for n, fault in enumerate(FAULTS)])
def test_the_planted_fault_is_found_and_nothing_else(fault: Fault, sites):
    machine = fault.machine()
    fault.plant(machine)
    facts = machine.collect_facts(sites[fault.machine])
    judgement = judge(facts)
    assert facts.unreadable == ()
    assert judgement.failed == ()
    found = {finding.id: finding for finding in judgement.findings}
    assert found.keys() == {fault.rule, *fault.also}
    finding = found[fault.rule]
    assert finding.severity is BY_ID[fault.rule].severity
    assert finding.evidence, "a finding without evidence is an opinion"
    assert all(evidence.value and evidence.where for evidence in finding.evidence)
    assert fault.shows in "\n".join(f"{e.what} {e.value} {e.where}" for e in finding.evidence)
    assert finding.remedy
    assert finding.gain is None or 0 < finding.gain.at_most_ratio <= 1


def test_every_rule_has_a_planted_fault_and_an_id_of_its_own():
    assert {fault.rule for fault in FAULTS} == {rule.id for rule in RULES}
    assert not [name for name, times in Counter(rule.id for rule in RULES).items() if times > 1]


def test_every_rule_has_a_source_with_document_and_section():
    for rule in RULES:
        assert rule.source.document, rule.id
        assert rule.source.section, rule.id
        assert not rule.title.endswith("."), rule.id


def test_the_worst_findings_come_first_and_larger_gains_before_smaller_ones(sites):
    machine = h100_node()
    for fault in FAULTS:
        if fault.rule in ("gpu-persistence-off", "gpu-power-cap", "nccl-ib-disabled", "job-host-bound"):
            fault.plant(machine)
    findings = judge(machine.collect_facts(sites[h100_node])).findings
    ranks = [finding.severity.rank for finding in findings]
    assert ranks == sorted(ranks, reverse=True)
    assert findings[0].severity is Severity.CRITICAL
    warnings = [f.gain.at_most_ratio if f.gain else 0 for f in findings if f.severity is Severity.WARNING]
    assert warnings == sorted(warnings, reverse=True)


def test_gains_are_those_of_the_what_if_ladder(sites):
    machine = h100_node()
    fault = next(fault for fault in FAULTS if fault.rule == "job-exposed-communication")
    fault.plant(machine)
    (finding,) = judge(machine.collect_facts(sites[h100_node])).findings
    assert finding.gain.at_most_ratio == 30 / 126
    assert "at_most_communication_hidden" in finding.gain.basis


def test_without_a_ladder_no_gain_is_promised(sites):
    machine = h100_node()
    machine.run = None
    machine.environ["NCCL_IB_DISABLE"] = "1"
    found = judge(machine.collect_facts(sites[h100_node])).findings
    assert found[0].id == "nccl-ib-disabled"
    assert all(finding.gain is None for finding in found)


def test_a_rule_that_fails_costs_no_other_and_is_named(sites):
    def broken(facts):
        raise KeyError("nothing")

    machine = h100_node()
    machine.environ["NCCL_IB_DISABLE"] = "1"
    rules = [RULES[0], *(rule for rule in RULES if rule.id == "nccl-ib-disabled")]
    rules[0] = type(rules[0])("broken", Severity.INFO, "t", "w", "machine", rules[0].source, broken)
    judgement = judge(machine.collect_facts(sites[h100_node]), rules)
    assert [finding.id for finding in judgement.findings] == ["nccl-ib-disabled"]
    assert "rule broken: KeyError" in judgement.failed[0]


@pytest.mark.parametrize(
    ("rule", "evidence", "remedy"),
    [
        ("job-exposed-communication", "watching", 'tune="lossy"'),
        ("job-exposed-communication", "bucket_bytes", 'tune="exact"'),
        ("job-data-wait", "loader_workers 1", "num_workers=7"),
        ("job-data-wait", "loader_workers 8", "make samples cheaper"),
        ("job-checkpoint", "in the background already", "save less often"),
        ("job-checkpoint", "20.0%", "async_save"),
        ("cpu-omp-threads", "ranks on this machine 2", "OMP_NUM_THREADS=8"),
        ("cpu-oversubscribed", "24 ranks", "--nproc-per-node 16"),
        ("script-loader-settings", "without persistent_workers", "DataLoader(..., persistent_workers=True)"),
        ("job-host-bound", "compiled already", "reduce-overhead"),
        ("job-host-bound", "host bound", "torch.compile(model)"),
        ("gpu-power-cap", "700 W", "-i 3 -pl 700"),
        ("nccl-ib-disabled", "nccl.conf:2", "sed -i '2d' "),
        ("pci-acs", "redirects", "0000:42:00.0"),
        ("net-tcp-buffers", "2 ms round trip", "tcp_rmem='4096 131072 67108864'"),
    ],
)
def test_the_command_names_this_machines_own_parts_and_what_was_done_already(rule, evidence, remedy, sites):
    commands = []
    for fault in (fault for fault in FAULTS if fault.rule == rule):
        machine = fault.machine()
        fault.plant(machine)
        found = next(f for f in judge(machine.collect_facts(sites[fault.machine])).findings if f.id == rule)
        if evidence in "\n".join(f"{e.what} {e.value} {e.where}" for e in found.evidence):
            commands.append(found.remedy)
    assert any(remedy in command for command in commands), commands


@pytest.mark.parametrize(
    "plant",
    [
        both(load(of_five_minutes=15), pressure("cpu", "some", 0.05)),
        # Tasks that wait for a disk count in the load, but the pressure shows that processors are free.
        both(load(of_five_minutes=40), pressure("cpu", "some", 0.02)),
        pressure("memory", "some", 0.5),
        pressure("io", "some", 0.5),
        variable("OMP_NUM_THREADS", "8"),
        variable("OMP_NUM_THREADS", "1"),
        variable("OMP_NUM_THREADS", "many"),
        job(checkpoint_ns=15 * MS),
        job(ledger={"data_wait": 3}),
    ],
)
def test_a_busy_machine_and_a_job_that_loses_little_are_left_alone(plant, sites):
    machine = h100_node()
    plant(machine)
    judgement = judge(machine.collect_facts(sites[h100_node]))
    assert [finding.id for finding in judgement.findings] == []


def test_as_many_ranks_as_processors_are_not_too_many(sites):
    machine = no_gpu()
    on_processors(16)(machine)
    assert [finding.id for finding in judge(machine.collect_facts(sites[no_gpu])).findings] == []


@pytest.mark.parametrize("text", ["some avg10=x\n", "", "weather\n", "some avg10=1 avg60=? total=1\n"])
def test_a_malformed_pressure_is_named_and_nothing_else_is_lost(text, sites):
    machine = h100_node()
    machine.files["proc/pressure/cpu"] = text
    machine.files["proc/loadavg"] = "busy\n"
    facts = machine.collect_facts(sites[h100_node])
    assert facts.cpus.pressure.cpu is None
    assert facts.cpus.load is None
    assert any("proc/pressure/cpu" in note for note in facts.unreadable)
    assert any("proc/loadavg" in note for note in facts.unreadable)


def test_a_shared_memory_without_a_size_is_half_of_the_memory(sites):
    machine = h100_node()
    machine.files[f"proc/{PID}/mounts"] = "shm /dev/shm tmpfs rw 0 0\n"
    facts = machine.collect_facts(sites[h100_node])
    assert facts.limits.shared_memory_bytes.value == 2113513564 * 1024 // 2
    assert judge(facts).findings == ()
