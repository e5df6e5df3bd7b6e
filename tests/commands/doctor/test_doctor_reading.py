"""Unreadable files are reported and lose nothing else; odd contents cause neither findings nor crashes."""

from __future__ import annotations

import dataclasses
import os

import pytest

from pacecar.commands.doctor.collect_facts import collect_facts
from pacecar.commands.doctor.facts.evidence import FactError
from pacecar.commands.doctor.facts.log import read_log
from pacecar.commands.doctor.facts.model import Seen
from pacecar.commands.doctor.facts.pci import pci_key
from pacecar.commands.doctor.facts.run import READ_BYTES, read_run
from pacecar.commands.doctor.facts.script import read_script
from pacecar.commands.doctor.rules.registry import judge
from pacecar.commands.doctor.topology import distance, nearest, offers
from pacecar.kernel_files.reader import KernelFiles
from tests.commands.doctor.faults import WRITES, inspected
from tests.commands.doctor.machine import HOST, LOG, PID, SCRIPT, h100_node, records, workstation
from tests.kit.nccl_files import init_line, timings_line


class FailingFiles(KernelFiles):
    """Fails at the n-th read (1 is the first)."""

    def __init__(self, access, fail_at):
        super().__init__(access.proc, access.sys)
        self.fail_at, self.reads, self.failed = fail_at, 0, None

    def read(self, path):
        self.reads += 1
        if self.reads == self.fail_at:
            self.failed = path
            raise OSError(5, "Input/output error", str(path))
        return super().read(path)


@pytest.mark.slow
def test_whichever_read_fails_is_named_and_nothing_is_found_because_of_it(tmp_path):
    machine = workstation()
    machine.write(tmp_path)
    reads = 0
    for fail_at in range(1, 2000):
        access = machine.access(tmp_path)
        files = FailingFiles(access, fail_at)
        facts = collect_facts(dataclasses.replace(access, files=files), host=HOST)
        if files.failed is None:
            break
        reads += 1
        assert facts.unreadable == (f"{files.failed}: Input/output error",)
        judgement = judge(facts)
        assert judgement.findings == ()
        assert judgement.failed == ()
    assert reads > 60, "the machine is read at all"


GARBAGE = ("", "\n", "garbage", "-", "9" * 400, "a b c d e f g\n" * 3, "\x00\xff\x00", "4: \n", "\u0663\n")


@pytest.mark.slow
@pytest.mark.parametrize("text", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_in_every_file_at_once_is_no_crash_and_blames_no_hardware(text, tmp_path):
    machine = h100_node()
    machine.run = machine.script = machine.log = None
    machine.files = {name: text.encode("utf-8", "surrogatepass") for name in machine.files}
    facts = machine.collect_facts(tmp_path)
    judgement = judge(facts)
    assert judgement.failed == ()
    assert {finding.id for finding in judgement.findings} <= {"shm-small"}


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A node without its job, written once."""
    machine, root = h100_node(), tmp_path_factory.mktemp("bare")
    machine.run = machine.script = machine.log = None
    machine.write(root)
    return machine, root


@pytest.mark.parametrize("kind", sorted({name.rpartition("/")[2] for name in h100_node().files}))
def test_a_file_of_each_kind_that_cannot_be_read_is_named(kind, bare):
    """A folder in place of a file: reading it fails like a broken file, even for root."""
    machine, root = bare
    names = [name for name in machine.files if name.endswith(f"/{kind}") and f"/self/{kind}" not in name]
    path = root / max(names, key=lambda name: (name.count("/"), name))  # of a card or the port above it: those are read
    text = path.read_bytes()
    path.unlink()
    path.mkdir()
    try:
        facts = collect_facts(machine.access(root), host=HOST)
        judgement = judge(facts)
        assert judgement.failed == ()
        assert judgement.findings == ()
        assert facts.unreadable
        assert all(kind in note for note in facts.unreadable)
    finally:
        path.rmdir()
        path.write_bytes(text)


def test_without_any_file_there_is_nothing_to_say(tmp_path):
    machine = h100_node()
    machine.files, machine.links, machine.boards = {}, {}, []
    machine.run = machine.script = machine.log = machine.pid = None
    facts = machine.collect_facts(tmp_path)
    assert judge(facts).findings == ()
    assert facts.cpus.count is None
    assert facts.cpus.memory_bytes is None


def test_an_unreadable_environment_of_another_user_is_named_and_the_files_still_count(tmp_path):
    machine = h100_node()
    machine.files["etc/nccl.conf"] = "NCCL_IB_DISABLE=1\n"
    machine.write(tmp_path)
    (tmp_path / f"proc/{PID}/environ").unlink()
    (tmp_path / f"proc/{PID}/environ").mkdir()
    facts = collect_facts(machine.access(tmp_path), host=HOST)
    assert [note for note in facts.unreadable if "environ" in note]
    assert "nccl-ib-disabled" in [finding.id for finding in judge(facts).findings]


def test_configuration_space_without_the_extended_part_is_limited_not_broken(tmp_path):
    machine = h100_node()
    machine.files = {
        name: text[:64] if name.endswith("/config") and isinstance(text, bytes) else text
        for name, text in machine.files.items()
    }
    facts = machine.collect_facts(tmp_path)
    assert facts.unreadable == ()
    assert len(facts.limited) == 1
    assert "only root" in facts.limited[0]


def test_variables_win_over_files_and_the_users_file_over_the_administrators(tmp_path):
    machine = h100_node()
    machine.files["etc/nccl.conf"] = "# NCCL_PROTO=no\nNCCL_ALGO=Ring\nNCCL_PROTO=LL\nNCCL_DEBUG=INFO\n"
    machine.files["home/.nccl.conf"] = "NCCL_PROTO=LL128\nNCCL_DEBUG=TRACE\n"
    machine.environ["NCCL_DEBUG"] = "WARN"
    values = machine.collect_facts(tmp_path).settings.values
    assert values["NCCL_ALGO"] == Seen("Ring", f"{tmp_path}/etc/nccl.conf:2")
    assert values["NCCL_PROTO"].value == "LL128"
    assert values["NCCL_DEBUG"].where.endswith("environ")


def test_a_process_that_may_lock_all_memory_needs_no_higher_limit(tmp_path):
    machine = h100_node()
    machine.files[f"proc/{PID}/limits"] = "Max locked memory 8388608 8388608 bytes\n"
    machine.files[f"proc/{PID}/status"] = "CapEff:\t000001ffffffffff\nCpus_allowed_list:\t0-7\n"
    facts = machine.collect_facts(tmp_path)
    assert facts.limits.may_lock_all is True
    assert judge(facts).findings == ()


@pytest.mark.slow
def test_the_inspector_is_silent_where_it_is_absent_or_the_communicators_are_alike(tmp_path):
    for number, (times, environ) in enumerate(
        [([], {"NCCL_INSPECTOR_ENABLE": "0"}), ([1000, 1400], {}), ([1000, 1100, 1200], {}), ([1000], {})]
    ):
        machine = h100_node()
        inspected(times, **WRITES, **environ)(machine)
        facts = machine.collect_facts(tmp_path / str(number))
        assert not [finding.id for finding in judge(facts).findings]
        assert facts.unreadable == ()
    assert h100_node().collect_facts(tmp_path / "none").inspector.files == 0, "the run folder was looked into"


def test_a_damaged_file_of_the_inspector_is_named(tmp_path):
    machine = h100_node()
    inspected([1000], **WRITES)(machine)
    machine.files[f"proc/{PID}/cwd/inspector/{HOST}-pid0.log"] += "{}\n"
    (note,) = machine.collect_facts(tmp_path).unreadable
    assert f"{HOST}-pid0.log:21: left out" in note


@pytest.mark.slow
def test_the_log_of_a_process_is_found_by_its_variable(tmp_path):
    machine = h100_node()
    machine.log = None
    machine.environ["NCCL_DEBUG_FILE"] = "nccl.%h.%p"
    machine.files[f"proc/{PID}/cwd/nccl.{HOST}.{PID}"] = init_line(0) + timings_line(45)
    facts = machine.collect_facts(tmp_path)
    assert facts.log.where.endswith(f"proc/{PID}/cwd/nccl.{HOST}.{PID}")
    assert [finding.id for finding in judge(facts).findings] == ["log-slow-init"]
    machine.files[f"proc/{PID}/cwd/nccl.{HOST}.{PID}"] = "nothing of NCCL's\n"
    facts = machine.collect_facts(tmp_path / "other")
    assert (facts.log, facts.unreadable) == (None, ())


@pytest.mark.slow
@pytest.mark.parametrize(("value", "is_on"), [("1", True), ("0", False), ("yes", False), ("0x1", True), (" 2", True)])
def test_a_variable_of_nccls_is_read_as_nccl_reads_it(value, is_on, tmp_path):
    machine = h100_node()
    machine.environ["NCCL_IB_DISABLE"] = value
    assert ("nccl-ib-disabled" in [f.id for f in judge(machine.collect_facts(tmp_path)).findings]) == is_on


def test_only_variables_that_a_rule_may_ask_for_are_kept(tmp_path):
    machine = h100_node()
    machine.environ |= {"AWS_SECRET_ACCESS_KEY": "hush", "PASSWORD": "hush", "CUDA_LAUNCH_BLOCKING": "1"}
    facts = machine.collect_facts(tmp_path)
    assert "hush" not in repr(facts)
    assert facts.settings.is_on("CUDA_LAUNCH_BLOCKING")


def test_the_topology_is_that_of_the_tree(tmp_path):
    facts = h100_node().collect_facts(tmp_path)
    first, other, far = (facts.device_at(facts.gpus.boards[n].address) for n in (0, 1, 7))
    port = facts.device_at(facts.network.ports[0].address)
    ethernet = facts.device_at("0000:03:00.0")
    assert first is not None
    assert None not in (other, far, port, ethernet)
    assert distance(first, port) == "PIX"
    assert distance(first, other) == "NODE"
    assert distance(first, far) == "SYS"
    assert distance(first, ethernet) == "NODE"
    assert nearest(facts, facts.gpus.boards[5]) == ("PIX", ("mlx5_5:1",))
    said = offers(facts)
    assert said["nvlink"] == {"gpus": 8, "links_up": 144, "links_down": 0, "has_switch": True}
    assert said["p2p"] == {"pairs": 28, "possible": 28}
    assert said["rdma"]["gpudirect"] == "nvidia-peermem"
    assert said["in_use"] == {"NET/IB/GDRDMA": 1, "P2P": 1}


@pytest.mark.slow
def test_dma_buf_needs_the_open_module_and_its_kernel(tmp_path):
    for kernel, expected in (("5.15.0-1", "dma-buf"), ("5.4.0-1", None)):
        machine = h100_node()
        machine.remove("sys/module/nvidia_peermem")
        machine.files["proc/sys/kernel/osrelease"] = kernel
        folder = tmp_path / kernel
        folder.mkdir()
        facts = machine.collect_facts(folder)
        assert offers(facts)["rdma"]["gpudirect"] == expected
        assert ("rdma-no-gpudirect" in [f.id for f in judge(facts).findings]) == (expected is None)


def test_addresses_are_the_kernels():
    assert pci_key("00000000:1B:00.0") == "0000:1b:00.0"
    assert pci_key("00010001:00:00.0") == "10001:00:00.0"


LINES = (
    ("0[1b000] -> 1[43000] via P2P/IPC", "P2P"),
    ("0[0] -> 1[1] via SHM/direct/direct", "SHM"),
    ("7[7] -> 8[0] [send] via NET/IBext_v8/2/GDRDMA", "NET/IBext_v8/GDRDMA"),
    ("7[7] -> 8[0] [send] via NET/Socket/3", "NET/Socket"),
    ("7[7] -> 8[0] [send] via NET/AWS Libfabric/0", "NET/AWS Libfabric"),
    ("7[7] -> 8[0] [send] via NET/AWS Libfabric/0/GDRDMA", "NET/AWS Libfabric/GDRDMA"),
)


@pytest.mark.parametrize(("line", "transport"), LINES)
@pytest.mark.parametrize("channel", ["Channel 00/0 :", "Channel 03 :"])
def test_a_channels_transport_is_known_in_the_forms_of_all_versions(line, transport, channel, tmp_path):
    (tmp_path / "log").write_text(f"host:1:2 [0] NCCL INFO {channel} {line}\n")
    log = read_log(tmp_path / "log")[0]
    assert list(log.transports) == [transport]
    assert log.transports[transport][1] == 1


def test_a_file_that_is_no_log_is_refused_by_name(tmp_path):
    (tmp_path / "log").write_text("epoch 1\nloss 0.5\n")
    with pytest.raises(FactError, match="no NCCL lines"):
        read_log(tmp_path / "log")
    (tmp_path / "log").write_bytes(b"\xff\xfe\n" + LOG.encode())
    assert read_log(tmp_path / "log")[0].version == "2.21.5+cuda12.4"


def test_a_script_that_does_not_parse_is_refused_with_its_line(tmp_path):
    (tmp_path / "train.py").write_text("import torch\nmodel = = 3\n")
    with pytest.raises(FactError, match=r"train\.py:2"):
        read_script(tmp_path / "train.py")
    (tmp_path / "train.py").write_bytes(b"\x00\x01")
    with pytest.raises(FactError):
        read_script(tmp_path / "train.py")


@pytest.mark.parametrize(
    "line",
    [
        "DDP(model, **options)", "DDP(model, find_unused_parameters=args.unused, gradient_as_bucket_view=True)",
        "DataLoader(dataset, num_workers=args.workers, pin_memory=args.pin)", "DataLoader(*arguments)",
    ],
)  # fmt: skip
def test_what_a_script_computes_is_not_judged(line, tmp_path):
    machine = h100_node()
    machine.run = None
    machine.script = f"{SCRIPT}\n{line}\n"
    assert judge(machine.collect_facts(tmp_path)).findings == ()


@pytest.mark.parametrize(
    "imported",
    [
        "import torch.nn.parallel as p\np.DistributedDataParallel(m)",
        "from torch.nn.parallel import DistributedDataParallel\nDistributedDataParallel(m)",
        "import torch\ntorch.nn.parallel.DistributedDataParallel(m)",
    ],
)
def test_ddp_is_found_by_whatever_name_it_was_imported(imported, tmp_path):
    (tmp_path / "train.py").write_text(imported)
    assert len(read_script(tmp_path / "train.py")[0].of("DistributedDataParallel")) == 1


def test_a_run_folder_without_records_is_refused_and_damaged_lines_are_counted(tmp_path):
    with pytest.raises(FactError, match="no record of any rank"):
        read_run(tmp_path)
    with pytest.raises(FactError, match="cannot be read"):
        read_run(tmp_path / "nowhere")
    machine = h100_node()
    machine.write(tmp_path)
    path = tmp_path / "run/rank1.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"{broken\n", b"null\n", *lines[3:], b'{"type":"step","half']))
    run, notes = read_run(tmp_path / "run")
    assert notes == (f"{path}: 2 of {len(lines) + 2} lines are not records and were left out",)
    assert run.steps == 40
    assert run.share("exposed_communication") == 0.04


@pytest.mark.slow
def test_of_a_long_run_the_first_line_and_the_last_steps_count(tmp_path):
    machine = h100_node()
    machine.write(tmp_path)
    path = tmp_path / "run/rank0.jsonl"
    hello, *rest = path.read_bytes().splitlines(keepends=True)
    early = machine_lines(ledger={"exposed_communication": 900})
    path.write_bytes(hello + b"".join(early) * (READ_BYTES // sum(map(len, early)) + 2) + b"".join(rest) * 20)
    assert path.stat().st_size > READ_BYTES
    run, notes = read_run(tmp_path / "run")
    assert notes == ()
    assert [h.rank for h in run.hellos] == [0, 1]
    assert run.share("exposed_communication") == 0.04, "the warm-up is long gone"


def machine_lines(**changes) -> list[bytes]:
    import msgspec

    return [msgspec.json.encode(record) + b"\n" for record in records(0, **changes)[1:21]]


@pytest.mark.slow
def test_a_log_without_end_is_read_to_its_bound_and_said_to_be(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(LOG.encode() + b"x" * (3 << 20) + b" NCCL WARN no\n" + b"NCCL WARN late\n" * 100_000)
    log, notes = read_log(path, most_bytes=2 << 20)
    assert log.version == "2.21.5+cuda12.4"
    assert log.warnings == (), "a line that is longer than NCCL writes them counts with its beginning only"
    assert notes == (f"{path}: only the first 2 of 4 MiB were read",)
    assert read_log(path)[1] == ()
    assert read_log(path)[0].warning_count == 100_000


@pytest.mark.parametrize("prefix", ["", "[default0]:", "[1,14]<stdout>:", "[2025-01-01 00:00:00] "])
def test_the_logs_host_is_known_behind_what_launchers_put_before_it(prefix, tmp_path):
    (tmp_path / "log").write_text("".join(f"{prefix}{line}\n" for line in LOG.splitlines()))
    log = read_log(tmp_path / "log")[0]
    assert log.hosts == {"node-a"}
    assert log.is_of("node-a.cluster.local")
    assert not log.is_of("node-b")


def test_a_script_that_nests_deeper_than_python_goes_is_refused_not_a_crash(tmp_path, recwarn):
    (tmp_path / "train.py").write_text(f"x = {'+'.join(['a'] * 600)}\n")
    with pytest.raises(FactError, match=r"train\.py"):
        read_script(tmp_path / "train.py")
    (tmp_path / "train.py").write_text("x = '\\d'\n")
    read_script(tmp_path / "train.py")
    assert not recwarn.list, "an odd escape in somebody's script is not ours to warn of"


def test_a_pipe_among_the_ranks_is_not_waited_for(tmp_path):
    machine = h100_node()
    machine.write(tmp_path)
    os.mkfifo(tmp_path / "run/rank7.jsonl")
    run, notes = read_run(tmp_path / "run")
    assert notes == (f"{tmp_path}/run/rank7.jsonl: not a file",)
    assert len(run.hellos) == 2
