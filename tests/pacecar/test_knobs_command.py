"""`pacecar knobs` and `pacecar tune`: users' mistakes end with one line and an exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pacecar.commands.main import cli
from pacecar.controller.memory.knob_store import Fingerprint, KnobStore, StoredKnobs, remembered, stale
from pacecar.knobs import KNOBS, read_setting, setting

KIND = Fingerprint(
    parameters="f00d", elements=42_000_000, world_size=4, device="NVIDIA H200", backend="nccl",
    link="InfiniBand 200 Gb/s", torch="2.13", began={"bucket_bytes": 26214400, "micro_batch": 4},
)  # fmt: skip
ENTRY = StoredKnobs(
    key=KIND.key, fingerprint=KIND, knobs={"bucket_bytes": 4194304}, gain_ratio=0.123, pace_ns=90_500_000, steps=5000,
    saved_wall_ns=1_760_000_000 * 10**9, used_wall_ns=1_770_000_000 * 10**9, job="gpt-40m", pacecar_version="0.1.0",
)  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> KnobStore:
    file = KnobStore(tmp_path / "knobs.json", is_ours=False)
    file.change(lambda entries: remembered(entries, ENTRY))
    return file


def knobs(file: KnobStore, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["knobs", *arguments, "--file", str(file.path)])


def test_list_and_show_tell_what_is_remembered_with_units(file: KnobStore) -> None:
    listed = knobs(file, "list")
    assert listed.exit_code == 0
    for word in (ENTRY.key, "saves 12.3 %", "bucket_bytes 4 MiB", "42 M parameters, 4 ranks, NVIDIA H200"):
        assert word in listed.stdout
    shown = knobs(file, "show", ENTRY.key[:6]).stdout
    assert "90.5 ms a step" in shown
    assert [line.split() for line in shown.splitlines()[-2:]] == [
        ["bucket_bytes", "25", "MiB", "4", "MiB"],
        ["micro_batch", "4", "4"],
    ]
    assert max(map(len, (listed.stdout + shown).splitlines())) <= 80


def test_json_is_the_entry_itself(file: KnobStore) -> None:
    (document,) = json.loads(knobs(file, "list", "--json").stdout)
    assert document == json.loads(knobs(file, "show", ENTRY.key, "--json").stdout)
    assert document["gain_ratio"] == 0.123
    assert document["fingerprint"]["world_size"] == 4


def test_forget_by_key_by_staleness_and_all(file: KnobStore) -> None:
    assert "Forgot 0 entries" in knobs(file, "forget", "--stale").stdout
    file.change(lambda entries: stale(entries, ENTRY, "slower here"))
    assert "no longer tried: slower here" in knobs(file, "show", ENTRY.key).stdout
    assert "Forgot 1 entry" in knobs(file, "forget", "--stale").stdout
    file.change(lambda entries: remembered(entries, ENTRY))
    assert "Forgot 1 entry" in knobs(file, "forget", ENTRY.key).stdout
    assert file.read() == ()
    assert knobs(file, "list").stdout.startswith("Nothing is remembered")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("show", "ab"), 2, "too short"),
        (("show", "abcdef"), 1, "no entries of"),
        (("forget",), 2, "give KEYS, or --all, or --stale"),
        (("forget", "--all", "--stale"), 2, "give KEYS"),
    ],
)
def test_what_is_typed_wrongly_is_said(file: KnobStore, arguments: tuple[str, ...], code: int, said: str) -> None:
    done = knobs(file, *arguments)
    assert done.exit_code == code
    assert said in done.output
    assert len(file.read()) == 1


def test_a_damaged_file_is_named_and_left_for_its_owner(tmp_path: Path) -> None:
    (tmp_path / "knobs.json").write_text('{"format": "pacecar knobs", "version":')
    done = knobs(KnobStore(tmp_path / "knobs.json", is_ours=False), "list")
    assert done.exit_code == 1
    assert "knobs.json: damaged" in done.output
    assert (tmp_path / "knobs.json").exists()


@pytest.mark.slow
def test_listing_needs_no_torch() -> None:
    code = "import pacecar.controller.memory.knob_store, pacecar.commands.knobs, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("knob", [knob for knob in KNOBS if knob.choices], ids=lambda knob: knob.name)
def test_a_choice_is_typed_by_its_name(knob) -> None:
    assert [read_setting(knob.name, name) for name in knob.choices] == list(range(len(knob.choices)))


@pytest.mark.parametrize("value", [0, 2**16, 2**20 // 2, 25 * 2**20, 3 * 2**28])
def test_what_is_printed_can_be_typed(value: int) -> None:
    assert read_setting("bucket_bytes", setting("bucket_bytes", value)) == pytest.approx(value, rel=1e-3, abs=2)
    assert read_setting("bucket_bytes", str(value)) == value


@pytest.mark.parametrize("text", ["", "-1", "1.5", "nan", "inf", "1e3", "0x10", "4MB", "1" * 40, "٣", "4 5"])
def test_nonsense_is_no_value(text: str) -> None:
    with pytest.raises(ValueError, match="it wants"):
        read_setting("micro_batch", text)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("set", "bogus", "1", "job"), 2, "there is no knob 'bogus'"),
        (("set", "bucket_bytes", "4MB", "job"), 2, "it wants bytes, as in 4194304 or 4MiB"),
        (("status", "job"), 1, "cannot reach the daemon at /nonexistent/d.sock"),
        (("freeze",), 2, "Missing argument 'JOB'"),
    ],
)
def test_tune_says_what_is_wrong_before_it_asks_anybody(arguments: tuple[str, ...], code: int, said: str) -> None:
    done = CliRunner().invoke(cli, ["tune", *arguments, "--socket", "/nonexistent/d.sock"])
    assert done.exit_code == code
    assert said in done.output
