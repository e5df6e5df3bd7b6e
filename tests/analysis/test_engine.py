"""Many files, one answer: the same whoever reads them, and one bad file costs one file."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path

import msgspec
import pytest

from pacecar.analysis.document.report import TraceDocument
from pacecar.analysis.reading import parallel_reading
from pacecar.analysis.reading.one_file import EngineError, FileTask, WorkerAnswer
from pacecar.analysis.reading.parallel_reading import Options, analyze, analyze_files
from pacecar.analysis.reading.workers import run_in_processes
from pacecar.analysis.trace.columns import TraceWarning
from pacecar.analysis.trace.decoding.remote_file import TracePlace, Url
from tests.analysis.tracefiles import write_trace
from tests.kit.net import free_port

DRAWINGS = ("cccAAAA..cc", "cccccAA..cc", "ccAAAAA.dcc")


@pytest.fixture
def ranks(tmp_path: Path) -> list[Path]:
    steps = [(0, 11)]
    return [
        write_trace(tmp_path / f"rank{rank}.json", drawing, rank=rank, world_size=len(DRAWINGS), steps=steps)
        for rank, drawing in enumerate(DRAWINGS)
    ]


def encoded(document: TraceDocument) -> bytes:
    return msgspec.json.encode(document)


def test_each_file_has_a_report_in_the_files_order_and_the_ranks_are_laid_together(ranks: list[Path]) -> None:
    found = analyze_files(ranks)
    assert [(Path(report.file).name, report.rank) for report in found.traces] == [
        ("rank0.json", 0),
        ("rank1.json", 1),
        ("rank2.json", 2),
    ]
    assert found.traces[1].compute_ns == 7_000_000
    assert found.job is not None
    assert found.job.ranks == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.distributed
def test_processes_give_the_same_document_to_the_byte(ranks: list[Path]) -> None:
    assert encoded(analyze_files(ranks, Options(jobs=2))) == encoded(analyze_files(ranks))


def test_a_file_that_is_no_trace_costs_that_file_and_a_warning(ranks: list[Path], tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{"traceEvents": 7}')
    gone = tmp_path / "gone.json"
    found = analyze_files([bad, ranks[0], gone])
    assert [report.rank for report in found.traces] == [0]
    assert found.job is None
    assert [warning.code for warning in found.warnings] == ["unreadable", "unreadable"]
    for path, warning in zip((bad, gone), found.warnings, strict=True):
        assert warning.message.count(str(path)) == 1
        assert "\n" not in warning.message


def test_traces_too_big_to_be_held_together_stand_by_themselves_and_it_is_said(
    ranks: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        parallel_reading, "TABLES_BYTES_MAX", 2.5 * ranks[0].stat().st_size * parallel_reading.COLUMNS_SHARE
    )
    found = analyze(ranks)
    assert [table is not None for table in found.tables] == [True, True, False]
    assert len(found.document.traces) == 3
    assert found.document.job is not None
    assert found.document.job.ranks == [0, 1]
    assert [(warning.code, warning.count) for warning in found.document.warnings] == [("job_incomplete", 1)]


def test_progress_ends_at_all_bytes_and_all_files(ranks: list[Path]) -> None:
    seen: list[tuple[int, int, int, int]] = []
    analyze_files(ranks, progress=lambda *numbers: seen.append(numbers))
    size = sum(path.stat().st_size for path in ranks)
    assert seen[-1] == (size, size, 3, 3)
    assert [done for done, *_ in seen] == sorted(done for done, *_ in seen)


def test_the_progress_of_many_files_takes_no_time() -> None:
    files = 20_000
    seen: list[tuple[int, int, int, int]] = []
    begin = time.process_time()
    meter = parallel_reading._Meter([3] * files, lambda *numbers: seen.append(numbers))
    for index in range(files):
        meter.finish(index)
    assert time.process_time() - begin < 1
    assert seen[0] == (3, 3 * files, 1, files)
    assert seen[-1] == (3 * files, 3 * files, files, files)


@pytest.mark.parametrize(("name", "factor"), [("a.json", 1), ("a.json.gz", parallel_reading.COMPRESSION_RATIO)])
def test_the_json_in_a_file_is_estimated_by_how_it_begins_and_not_by_its_name(
    tmp_path: Path, name: str, factor: int
) -> None:
    path = write_trace(tmp_path / name, "cc")
    renamed = path.rename(tmp_path / "trace")
    if factor == 1:
        renamed.write_bytes(b"\n " + renamed.read_bytes())
    size = renamed.stat().st_size
    assert parallel_reading._plain_bytes(renamed, size) == size * factor


# --- processes ----------------------------------------------------------------------------------


def task(name: str) -> FileTask:
    return FileTask(Path(name), "trace", None, False)


def answer_by_name(task: FileTask, progress: Callable[[int, int | None], None]) -> WorkerAnswer:
    """Do what the file's name says; runs in a process of its own."""
    progress(1, 2)
    match task.path.name:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exits":
            os._exit(3)
        case "killed once":
            marker = task.path.parent / "marker"
            if not marker.exists():
                marker.touch()
                time.sleep(0.5)  # so that the other one is seen to run at the same time
                os.kill(os.getpid(), signal.SIGKILL)
        case "slow":
            time.sleep(1)
    return WorkerAnswer(error=TraceWarning("done", task.path.name))


def run(names: list[str], jobs: int = 2, folder: Path = Path()) -> dict[str, TraceWarning]:
    tasks = [task(str(folder / name)) for name in names]
    answers = run_in_processes(tasks, range(len(tasks)), jobs, lambda *_: None, work=answer_by_name)
    return {names[index]: answer.error for index, answer in answers if answer.error is not None}


@pytest.mark.distributed
@pytest.mark.slow
def test_a_process_that_dies_loses_its_file_only_and_says_how() -> None:
    found = run(["a", "killed", "crashes", "exits", "b"])
    assert found["a"].code == found["b"].code == "done"
    died = {name: found[name].message for name in ("killed", "crashes", "exits")}
    assert all(found[name].code == "worker_died" for name in died)
    assert "out of memory" in died["killed"]
    assert "SIGSEGV" in died["crashes"]
    assert "exit code 3" in died["exits"]
    assert not [child for child in multiprocessing.active_children() if child.is_alive()]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("place", [Url("https://me:word@host/killed?sig=abc"), Path(os.fsdecode(b"/run/\xff/killed"))])
def test_a_process_that_dies_is_said_without_secrets_in_utf_8(place: TracePlace) -> None:
    tasks = [FileTask(place, "trace", None, False)]
    ((_, answer),) = run_in_processes(tasks, [0], 1, lambda *_: None, work=answer_by_name)
    assert answer.error is not None
    said = msgspec.json.encode(answer.error).decode()
    assert ("https://host/killed: " if isinstance(place, Url) else "/run/\N{REPLACEMENT CHARACTER}/killed: ") in said


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.slow
def test_processes_start_with_a_long_tmpdir(ranks: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    line = [sys.executable, "-m", "pacecar", "analyze", *map(str, ranks), "--json", "--jobs", "2"]
    done = subprocess.run(line, env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip() == encoded(analyze_files(ranks))


@pytest.mark.slow
def test_ctrl_c_does_not_reach_the_server_of_processes_while_it_starts() -> None:
    code = (
        "import signal; from multiprocessing import forkserver; from pacecar.analysis.reading import workers\n"
        "workers._start_server()\n"
        "print(open(f'/proc/{forkserver._forkserver._forkserver_pid}/status').read())\n"
        "assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    (blocked,) = (line.split()[1] for line in done.stdout.splitlines() if line.startswith("SigBlk"))
    assert int(blocked, 16) & 1 << signal.SIGINT - 1


@pytest.mark.distributed
@pytest.mark.slow
def test_what_was_killed_beside_another_is_tried_again_alone(tmp_path: Path) -> None:
    found = run(["killed once", "slow"], folder=tmp_path)
    assert found["killed once"].code == "done"


@pytest.mark.distributed
@pytest.mark.slow
def test_processes_end_when_nobody_wants_their_answers_any_more() -> None:
    answers = run_in_processes([task("slow"), task("a")], [0, 1], 2, lambda *_: None, work=answer_by_name)
    next(answers)
    answers.close()
    assert multiprocessing.active_children() == []


# --- dask ---------------------------------------------------------------------------------------


@pytest.fixture
def _environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back what dask leaves behind: with a PYTHONHASHSEED no later test of this process can fork a python."""
    for name in ("PYTHONHASHSEED", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS",
                 "MALLOC_TRIM_THRESHOLD_", "__DASK_PARENT_PID"):  # fmt: skip
        monkeypatch.setenv(name, "")  # so that it is put back, or taken away, at the end
        monkeypatch.delenv(name)


@pytest.mark.slow
def test_dask_without_an_address_or_a_scheduler_is_one_clear_error_soon(
    ranks: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineError, match="--dask-address"):
        analyze_files(ranks, Options(engine="dask"))
    pytest.importorskip("distributed")
    from pacecar.analysis.reading import cluster

    monkeypatch.setattr(cluster, "CONNECT_SECONDS_MAX", 0.5)
    port = free_port()
    started = time.monotonic()
    with pytest.raises(EngineError, match=f"127.0.0.1:{port}: no dask scheduler") as raised:
        analyze_files(ranks, Options(engine="dask", dask_address=f"tcp://127.0.0.1:{port}"))
    assert time.monotonic() - started < 10
    assert "\n" not in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("address", ["scheduler", "tcp://scheduler:port"])
def test_a_dask_address_without_a_port_is_refused_at_once(
    ranks: list[Path], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed = pytest.importorskip("distributed")
    monkeypatch.setattr(distributed, "Client", lambda *_, **__: pytest.fail("a client was made that cannot be closed"))
    with pytest.raises(EngineError, match=f"{address}: no dask scheduler answers there"):
        analyze_files(ranks, Options(engine="dask", dask_address=address))


def test_workers_of_another_version_are_one_clear_error(ranks: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = pytest.importorskip("distributed")
    from pacecar.analysis.reading import cluster

    class Future:
        def exception(self) -> None: ...

        def result(self) -> bytes:
            return zlib.compress(msgspec.msgpack.encode(["of another version"]))

    class Client:
        loop = None

        def submit(self, *_: object, **__: object) -> Future:
            return Future()

        def close(self) -> None: ...

    monkeypatch.setattr(cluster, "_connect", lambda _: Client())
    monkeypatch.setattr(distributed, "as_completed", lambda futures, loop: iter(futures))
    with pytest.raises(EngineError, match="another version of pacecar"):
        analyze_files(ranks, Options(engine="dask", dask_address="tcp://scheduler:8786"))


@pytest.mark.parametrize("error", [CancelledError("read-1 cancelled\nlost"), ConnectionError("closed")])
def test_a_dask_scheduler_that_goes_away_is_one_clear_error(error: Exception) -> None:
    from pacecar.analysis.reading import cluster

    class Future:
        def exception(self) -> None: ...

        def result(self) -> bytes:
            raise error

    with pytest.raises(EngineError, match=r"the dask scheduler is gone: (read-1 cancelled|closed)$"):
        cluster._answer(Future(), task("rank0.json"))


@pytest.mark.parametrize("error", [type("KilledWorker", (Exception,), {})(), RuntimeError("broken")])
def test_a_dask_worker_that_dies_or_fails_is_said_without_secrets(error: Exception) -> None:
    from pacecar.analysis.reading import cluster

    class Future:
        def exception(self) -> Exception:
            return error

    place = Url("https://me:word@host/rank0.json?sig=abc")
    answer = cluster._answer(Future(), FileTask(place, "trace", None, False))
    assert answer.error is not None
    assert answer.error.message.startswith("https://host/rank0.json: ")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("_environment_stays")
def test_a_dask_cluster_gives_the_same_document_to_the_byte(ranks: list[Path], tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    bad = tmp_path / "bad.json"
    bad.write_text("[1, 2")
    files = [*ranks, bad]
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as found:
        here = analyze_files(files)
        there = analyze_files(files, Options(engine="dask", dask_address=found.scheduler_address))
    assert encoded(here) == encoded(there)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("_environment_stays")
def test_a_dask_scheduler_without_workers_is_an_error_and_not_a_wait_for_ever(
    ranks: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed = pytest.importorskip("distributed")
    from pacecar.analysis.reading import cluster

    monkeypatch.setattr(cluster, "CONNECT_SECONDS_MAX", 2.0)
    with (
        distributed.LocalCluster(n_workers=0, processes=False, dashboard_address=None, protocol="tcp://") as empty,
        pytest.raises(EngineError, match="no workers"),
    ):
        analyze_files(ranks, Options(engine="dask", dask_address=empty.scheduler_address))
