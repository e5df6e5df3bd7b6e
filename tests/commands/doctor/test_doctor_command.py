"""The command on this machine: exit codes, JSON, usage errors, terminal output."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pacecar.commands.doctor.facts.evidence import FindingEvidence, Gain
from pacecar.commands.doctor.findings import Finding, FindingSource, Severity
from pacecar.commands.doctor.rules.registry import Judgement, judge
from pacecar.commands.doctor.terminal_report import EVIDENCE_MAX, picture, render
from tests.commands.doctor.faults import FAULTS
from tests.commands.doctor.machine import SCRIPT, h100_node
from tests.kit.forking_python import forking_python

ENVIRONMENT = {
    name: value for name, value in os.environ.items()
    if not name.startswith(("PACECAR_", "NCCL_", "CUDA_", "TORCH_", "PYTORCH_", "GLOO_"))
}  # fmt: skip


def doctor(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pacecar", "doctor", *arguments],
        capture_output=True, text=True, timeout=60, check=False, env={**ENVIRONMENT, **environ},
    )  # fmt: skip


@pytest.mark.slow
def test_json_on_this_machine_is_whole_and_each_finding_has_evidence():
    done = doctor("--json", "--fail-on", "never")
    document = json.loads(done.stdout)
    assert done.returncode in (0, 3)
    assert done.stderr == ""
    assert document["schema_version"] == 1
    assert document["inventory"]["cpu"]["cpus"] == os.cpu_count()
    assert document["inventory"]["memory_bytes"] > 0
    assert sum(document["counts"].values()) == len(document["findings"])
    for finding in document["findings"]:
        assert finding["evidence"]
        assert finding["remedy"]
        assert finding["source"]


@pytest.mark.slow
def test_exit_codes_follow_fail_on():
    found = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    assert doctor("--json", **found).returncode == 1
    assert doctor("--json", "--fail-on", "critical", **found).returncode in (0, 3)
    assert doctor("--json", "--fail-on", "never", **found).returncode in (0, 3)
    assert doctor("--json", "--fail-on", "critical", CUDA_LAUNCH_BLOCKING="1").returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--run", "/no/such/folder"), "/no/such/folder"),
        (("--script", "/no/such/train.py"), "/no/such/train.py"),
        (("--nccl-log", "/no/such/log"), "/no/such/log"),
        (("--script", "/"), "no such file"),
        (("--pid", "999999999"), "999999999"),
        (("--pid", "0"), "--pid"),
        (("--fail-on", "always"), "always"),
        (("--round-trip-ms", "0"), "--round-trip-ms"),
        (("--round-trip-ms", "nan"), "--round-trip-ms"),
    ],
)
def test_wrong_use_exits_2_and_is_named(arguments, named):
    done = doctor(*arguments)
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_what_was_named_and_is_malformed_gives_the_rest_and_exit_3(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/rank0.jsonl").write_text("no record\n")
    (tmp_path / "train.py").write_text("def (:\n")
    (tmp_path / "log").write_text("nothing\n")
    given = (
        "--run",
        str(tmp_path / "run"),
        "--script",
        str(tmp_path / "train.py"),
        "--nccl-log",
        str(tmp_path / "log"),
    )
    done = doctor("--json", "--fail-on", "never", *given)
    assert done.returncode == 3
    document = json.loads(done.stdout)
    unreadable = "\n".join(document["unreadable"])
    for part in ("rank0.jsonl: 1 of 1 lines", "train.py:1", "no NCCL lines"):
        assert part in unreadable
    assert document["inventory"]["cpu"]["cpus"] == os.cpu_count()
    piped = doctor("--fail-on", "never", "--run", str(tmp_path / "run"))
    assert "could not read: " in piped.stdout
    assert piped.returncode == 3


@pytest.mark.slow
def test_a_process_environment_is_read_not_this_shells():
    sleeper = subprocess.Popen(["sleep", "60"], env={**ENVIRONMENT, "TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    try:
        document = json.loads(doctor("--json", "--pid", str(sleeper.pid), CUDA_LAUNCH_BLOCKING="1").stdout)
    finally:
        sleeper.kill()
        sleeper.wait()
    found = {finding["id"]: finding for finding in document["findings"]}
    assert "env-launch-blocking" not in found, "that is set in the doctor's own environment"
    assert found["env-debug-detail"]["evidence"][0]["where"] == f"/proc/{sleeper.pid}/environ"


@pytest.mark.slow
def test_the_recorded_run_script_and_log_go_through_the_command(tmp_path):
    machine = h100_node()
    machine.write(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT.replace(", gradient_as_bucket_view=True", ""))
    done = doctor("--run", str(tmp_path / "run"), "--script", str(tmp_path / "train.py"), "--fail-on", "info")
    assert done.returncode == 1
    assert "script-bucket-view" in done.stdout
    assert f"{tmp_path}/train.py:6" in done.stdout.replace("\n", "").replace(" ", "")
    assert all(line == line.rstrip() for line in done.stdout.splitlines()), "plain text has no filling"
    assert "\x1b" not in done.stdout


@pytest.mark.slow
def test_neither_torch_nor_rich_is_imported_for_json():
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom pacecar.commands.main import cli\n"
        "CliRunner().invoke(cli, ['doctor', '--json'])\n"
        "print(sorted({'torch', 'rich', 'numpy', 'prometheus_client', 'grafanalib'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_the_extra_that_the_message_names_is_there():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["doctor"] == ["rich>=13"]


def rendered(facts, judgement, width=100) -> str:
    from rich.console import Console

    console = Console(width=width, record=True, file=io.StringIO())
    console.print(picture(facts, judgement))
    return console.export_text()


def test_everything_of_a_finding_is_on_the_screen(tmp_path):
    machine = h100_node()
    for fault in FAULTS:
        if fault.rule in ("nccl-ib-disabled", "job-exposed-communication"):
            fault.plant(machine)
    facts = machine.collect_facts(tmp_path)
    judgement = judge(facts)
    text = " ".join(rendered(facts, judgement, width=400).split())
    for finding in judgement.findings:
        assert finding.severity.upper() in text
        for part in (finding.id, finding.title, finding.why, finding.remedy, str(finding.source)):
            assert " ".join(part.split()) in text
        assert finding.gain is None or f"at most {finding.gain.at_most_ratio:.0%}" in text
        assert finding.evidence[0].value in text
    assert "mlx5_0 port 1 to mlx5_7 port 1 (8): ACTIVE, 400 Gbit/s" in text, "eight alike are told once"


def test_a_range_has_no_gap_that_is_told_otherwise(tmp_path):
    machine = h100_node()
    for rule in ("nccl-ib-disabled", "rdma-port-slow"):
        next(fault for fault in FAULTS if fault.rule == rule).plant(machine)
    facts = machine.collect_facts(tmp_path)
    text = " ".join(rendered(facts, judge(facts), width=400).split())
    assert "mlx5_0 port 1, mlx5_1 port 1, mlx5_2 port 1 and 4 more: ACTIVE, 400 Gbit/s" in text
    assert "mlx5_5 port 1: ACTIVE, 200 Gbit/s" in text


def test_marks_in_what_people_wrote_are_text(tmp_path):
    facts = h100_node().collect_facts(tmp_path)
    evidence = tuple(FindingEvidence(f"[bold]{n}", f"[link=file:///]{n}[/]", "[red]x") for n in range(EVIDENCE_MAX + 5))
    finding = Finding(
        "x", Severity.INFO, "[title]", "[why]", evidence, "[do]", Gain(0.5, "[b]"), FindingSource("[d]", "[s]")
    )
    text = rendered(facts, Judgement((finding,), 1, {}))
    for part in ("[bold]0", "[link=file:///]3[/]", "[why]", "[do]", "[red]x", "and 5 more"):
        assert part in text


def test_what_would_steer_a_terminal_is_shown_and_not_sent(tmp_path):
    facts = dataclasses.replace(h100_node().collect_facts(tmp_path), unreadable=("a\x1b[2Jb", "c\u202ed\udc80"))
    evidence = (FindingEvidence("w\x1b", "\x1b]0;title\x07", "log\x9b:1"),)
    finding = Finding("x", Severity.INFO, "t", "w", evidence, "rm \x1b[8m", None, FindingSource("d", "s"))
    text = rendered(facts, Judgement((finding,), 1, {}))
    assert not [letter for letter in text if letter != "\n" and not letter.isprintable()]
    assert "\\x1b]0;title\\x07" in text
    assert "a\\x1b[2Jb" in text
    assert "c\\u202ed\\udc80" in text, "a mark of direction, and a name on disk that is no UTF-8"


def test_the_screen_is_the_same_however_it_is_printed(tmp_path, capsys):
    from rich.console import Console

    facts = h100_node().collect_facts(tmp_path)
    render(facts, judge(facts), Console(width=100))
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("Nothing found.  (")
    assert "8 x NVIDIA H100 80GB HBM3, 80 GiB, capability 9.0, 18 NVLinks" in out


JOB = """
import sys, time
import torch, pacecar

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def batches():
    for _ in range(60):
        time.sleep(0.02)
        yield torch.ones(64, 64)

with pacecar.attach(model, optimizer, tune="off", run_dir=sys.argv[1]) as pacer:
    for batch in pacer.data(batches()):
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_real_job_that_waits_for_its_data_is_told_so(tmp_path):
    pytest.importorskip("torch", reason="the extra `torch` is not installed")
    (tmp_path / "train.py").write_text(JOB)
    subprocess.run(
        [forking_python(), str(tmp_path / "train.py"), str(tmp_path / "run")],
        env={**ENVIRONMENT, "PACECAR_HOOK_SOCKET": str(tmp_path / "none"), "OMP_NUM_THREADS": "1"},
        timeout=300, check=True, capture_output=True,
    )  # fmt: skip
    done = doctor("--json", "--run", str(tmp_path / "run"))
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    found = {finding["id"]: finding for finding in document["findings"]}
    assert "of the step" in found["job-data-wait"]["evidence"][0]["value"]
    assert document["unreadable"] == []
    gain = found["job-data-wait"]["gain"]
    assert gain is None or 0.3 < gain["at_most_ratio"] < 1
