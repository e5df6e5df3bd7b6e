"""Traces at URLs: the same answers as from a folder, and a store's failures cost what they touch."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pacecar.analysis.document.report import TraceDocument
from pacecar.analysis.reading.parallel_reading import Options, analyze, analyze_files
from pacecar.analysis.reading.trace_paths import find_traces, natural_order, printable
from pacecar.analysis.trace.decoding.header import rank_in_name
from pacecar.analysis.trace.decoding.remote_file import Url, driver_errors, place_of
from pacecar.analysis.trace.reader import TraceError, read_trace
from pacecar.commands.analyze import AnalyzeOptions, run_analyze
from tests.analysis.test_engine import encoded
from tests.analysis.tracefiles import document

fsspec = pytest.importorskip("fsspec")

DRAWINGS = ("cccAAAA..cc", "cccccAA..cc", "ccAAAAA.dcc")


def packed(rank: int | None, drawing: str) -> bytes:
    trace = document(drawing, rank=rank, world_size=len(DRAWINGS), steps=[(0, 11)])
    return gzip.compress(json.dumps(trace).encode(), mtime=0)


@pytest.fixture
def bucket() -> Iterator[Any]:
    """Return fsspec's memory with the traces of three ranks in /run."""
    memory = fsspec.filesystem("memory")
    for rank, drawing in enumerate(DRAWINGS):
        memory.pipe(f"/run/iteration_10/rank{rank}_trace.json.gz", packed(rank, drawing))
    yield memory
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


class RefusedError(Exception):
    """As a driver's own library raises it."""


class LockedStore(fsspec.get_filesystem_class("memory")):  # type: ignore[misc]
    """A store that lists but does not open what has `locked` in its name, and does not list /secret."""

    protocol = "locked"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        stripped: str = super()._strip_protocol(path.removeprefix("locked://"))
        return stripped

    def find(self, path: str, **kwargs: Any) -> Any:
        if path.startswith("/secret"):
            raise PermissionError("Access Denied")
        return super().find(path, **kwargs)

    def _open(self, path: str, *args: Any, **kwargs: Any) -> Any:
        if "locked" in path.rpartition("/")[2]:
            raise RefusedError("token expired\nat line 3")
        return super()._open(path, *args, **kwargs)


class HostedStore(LockedStore):
    """A store whose host is an option of the driver, as with Azure, SFTP and HDFS."""

    protocol = "hosted"

    def __init__(self, host: str, **options: Any) -> None:
        super().__init__(**options)
        self.host = host

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        rest = path.removeprefix("hosted://")
        return rest if rest == path else f"/{rest.partition('/')[2]}".rstrip("/")

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        host = path.removeprefix("hosted://").partition("/")[0]
        return {"host": host} if host else {}


@pytest.fixture
def locked(bucket: Any) -> None:
    fsspec.register_implementation("locked", LockedStore, clobber=True)


def without_files(found: TraceDocument) -> bytes:
    for each in found.traces:
        each.file = Path(each.file).name
    return encoded(found)


@pytest.mark.slow
def test_a_url_gives_the_document_of_the_same_files_in_a_folder(bucket: Any, tmp_path: Path) -> None:
    for name in bucket.find("/run"):
        (tmp_path / Path(name).name).write_bytes(bucket.cat(name))
    there = find_traces([Url("memory://run")])
    assert there.errors == ()
    assert [str(file) for file in there.files] == [
        f"memory:///run/iteration_10/rank{rank}_trace.json.gz" for rank in range(3)
    ]
    assert [file.size for file in there.files if isinstance(file, Url)] == bucket.sizes(sorted(bucket.find("/run")))
    remote = analyze_files(there.files)
    assert remote.job is not None
    assert remote.job.ranks == [0, 1, 2]
    assert without_files(remote) == without_files(analyze_files(find_traces([tmp_path]).files))


@pytest.mark.parametrize("url", ["hosted://me@there/run", "hosted://me@there/run/iteration_10/", "hosted://me@there/"])
def test_what_is_listed_on_a_host_is_opened_there(bucket: Any, url: str) -> None:
    fsspec.register_implementation("hosted", HostedStore, clobber=True)
    found = find_traces([Url(url)])
    assert [str(file) for file in found.files] == [
        f"hosted://me@there/run/iteration_10/rank{rank}_trace.json.gz" for rank in range(3)
    ]
    assert [report.rank for report in analyze_files(found.files).traces] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.distributed
def test_processes_open_urls_themselves(bucket: Any, tmp_path: Path) -> None:
    for name in bucket.find("/run"):
        (tmp_path / Path(name).name).write_bytes(bucket.cat(name))
    files = find_traces([Url(f"file://{tmp_path}")]).files
    assert all(isinstance(file, Url) for file in files)
    assert without_files(analyze_files(files, Options(jobs=2))) == without_files(analyze_files(files))


def test_one_object_may_have_any_name_and_no_name_is_listed_twice(bucket: Any) -> None:
    bucket.pipe("/odd/profile.out", packed(0, DRAWINGS[0]))
    bucket.pipe("/odd/.hidden.json", b"{}")
    named = Url("memory:///run/iteration_10/rank0_trace.json.gz")
    assert [str(file) for file in find_traces([Url("memory:///odd/profile.out")]).files] == [
        "memory:///odd/profile.out"
    ]
    assert len(find_traces([named, Url("memory://run")]).files) == 3
    assert "no trace there" in find_traces([Url("memory://odd")]).errors[0]


def test_a_store_that_refuses_a_listing_or_is_unknown_is_one_line_each(locked: None, bucket: Any) -> None:
    urls = ["locked:///secret/run", "nosuch://x/run", "memory:///gone/rank0.json", "memory:///run"]
    found = find_traces(map(place_of, urls))
    assert len(found.files) == 3
    denied, unknown, gone = found.errors
    assert denied == "locked:///secret/run: access denied"
    assert unknown.startswith("nosuch://x/run: ")
    assert "nosuch" in unknown.removeprefix("nosuch://x/run: ")
    assert gone.startswith("memory:///gone/rank0.json: ")
    assert not any("\n" in line for line in found.errors)


@pytest.mark.slow
def test_three_bad_objects_of_many_are_named_and_the_rest_is_answered(locked: None, bucket: Any) -> None:
    whole = packed(4, "c." * 20_000)
    bucket.pipe("/run/iteration_10/rank3_locked.json.gz", whole)
    bucket.pipe("/run/iteration_10/rank4.json.gz", whole[: len(whole) // 2])
    bucket.pipe("/run/iteration_10/rank5.json", b"<Error>NoSuchKey</Error>")
    found = analyze_files(find_traces([Url("locked:///run")]).files)
    ranks = [report.rank for report in found.traces]
    assert ranks[:3] == [0, 1, 2]
    refused, *_, last = found.warnings
    assert refused.message == "locked:///run/iteration_10/rank3_locked.json.gz: token expired"
    assert "rank5.json" in last.message
    cut = [each for each in found.traces if "rank4" in each.file]
    assert len(cut) == 1
    assert "truncated" in {warning.code for warning in cut[0].warnings}, cut[0].warnings


@pytest.mark.slow
def test_a_damaged_object_is_read_again_from_its_beginning(bucket: Any) -> None:
    data = bytearray(packed(0, "c." * 20_000))
    data[len(data) // 2] ^= 0xFF
    bucket.pipe("/bad/rank0.json.gz", bytes(data))
    trace = read_trace(Url("memory:///bad/rank0.json.gz"))
    assert trace.is_truncated
    assert 0 < trace.events < 20_000


def test_secrets_in_a_url_are_not_printed() -> None:
    url = Url("https://me:word@host/run/rank3.json?X-Amz-Signature=abc")
    assert printable(url) == "https://host/run/rank3.json"
    assert url.name == "rank3.json"
    with pytest.raises(TraceError) as raised:
        read_trace(url)
    answer = analyze([url]).document.warnings[0].message
    assert str(url) in str(raised.value)  # the reader's; what people see is the answer's
    assert "word" not in answer
    assert "abc" not in answer


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("sftp://me:word@host:22/run/rank3.json", "sftp://host:22/run/rank3.json"),
        ("ftp://me:w@rd@host/rank3.json", "ftp://host/rank3.json"),
        ("simplecache::https://me:word@host/rank3.json?sig=abc", "simplecache::https://host/rank3.json"),
        ("zip://rank3.json::sftp://me:word@host/run.zip", "zip://rank3.json::sftp://host/run.zip"),
        ("http://me:word@[fe80::abc:1]/rank3.json?sig=abc", "http://[fe80::abc:1]/rank3.json"),
        ("github://owner:repository@main/rank3.json", "github://owner:repository@main/rank3.json"),
        (
            "abfs://container@account.dfs.core.windows.net/a?b.json",
            "abfs://container@account.dfs.core.windows.net/a?b.json",
        ),
    ],
)
def test_a_login_is_not_printed_whatever_the_store(text: str, shown: str) -> None:
    assert printable(Url(text)) == shown


class WebError(Exception):
    __module__ = "aiohttp.client_exceptions"


def test_a_web_servers_refusal_is_not_a_missing_file_and_has_no_signature() -> None:
    url = Url("https://host/run/rank3.json?sig=a%2Fb")
    refusal = WebError("403, message='Forbidden', url='https://host/run/rank3.json?sig=a/b'")  # unquoted, as by aiohttp
    said = "403, message='Forbidden', url='https://host/run/rank3.json'"
    assert said_of(url, refusal) == said_of(url, FileNotFoundError(url.text), refusal) == said
    gone = FileNotFoundError(url.text)
    assert said_of(url, gone) == said_of(url, FileNotFoundError(url.text), gone) == "no such file or directory"


def said_of(url: Url, error: Exception, cause: Exception | None = None) -> str:
    with pytest.raises(OSError) as raised, driver_errors(url):  # noqa: PT011  the message is what is tested
        raise error from cause
    return str(raised.value)


def test_without_fsspec_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    assert "pacecar[remote]" in find_traces([Url("s3://bucket/run")]).errors[0]


# --- names and ranks ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank3_trace.json", 3),  # torchtitan
        ("rank12_trace.json.gz", 12),
        ("rank-3.json.gz", 3),  # Megatron
        ("ep0-ba3-rank12.json", 12),  # Composer
        ("rank7.12.pt.trace.json", 7),  # Composer's TorchProfiler
        ("worker3.1712345678901.pt.trace.json", 3),  # tensorboard_trace_handler(worker_name=...)
        ("node7_4242.1712345678901234.pt.trace.json", None),  # the handler by itself: host and process
        ("llama-worker-2_4242.1712345678901234.pt.trace.json", None),  # the same in a pod of Kubeflow's
        ("trace-lora-rank16-step40-rank3.json.gz", 3),  # ours, of a job called so
        ("libkineto_activities_4242.json", None),  # dynolog
        ("trace_4242.json", None),
        ("merged_trace.json", None),
        ("frankfurt3.json", None),
        ("node1_local_rank3.json.gz", None),
        ("LOCAL-RANK-3.json", None),
        ("localrank3.json", None),
        ("trace_rank11_local_rank3.json", 11),
        ("rank11_local_rank3.json", 11),
        ("local_rank3_rank11.json", 11),
    ],
)
def test_a_name_tells_the_rank_as_its_tool_writes_it(name: str, rank: int | None) -> None:
    assert rank_in_name(name) == rank


def test_ranks_are_chosen_before_anything_is_opened(locked: None, bucket: Any) -> None:
    bucket.pipe("/run/iteration_10/rank9_locked.json.gz", b"")
    bucket.pipe("/run/iteration_10/node_77.json.gz", packed(2, DRAWINGS[2]))  # its name does not tell
    found = find_traces([Url("locked:///run")], {0, 1, 40})
    assert [file.name for file in found.files] == ["node_77.json.gz", "rank0_trace.json.gz", "rank1_trace.json.gz"]
    document = analyze_files(found.files, Options(ranks=frozenset({0, 1, 40})))
    assert [report.rank for report in document.traces] == [0, 1]
    assert [warning.message for warning in document.warnings] == ["no trace of 1 of the 3 ranks asked for: 40"]
    none = find_traces([Url("locked:///run/iteration_10/rank0_trace.json.gz")], {5})
    assert none.files == ()
    assert "ranks asked for" in none.errors[0]


def test_the_command_takes_urls_and_ranks(bucket: Any, capfd: pytest.CaptureFixture[str]) -> None:
    options = AnalyzeOptions(paths=(Url("memory://run"),), as_json=True, ranks=frozenset({0, 2}))
    assert run_analyze(options) == 0
    assert [report["rank"] for report in json.loads(capfd.readouterr().out)["traces"]] == [0, 2]


def test_a_word_with_a_scheme_is_a_url_and_numbers_in_it_are_sorted_as_numbers() -> None:
    assert place_of("run/a.json") == Path("run/a.json")
    urls = [Url(f"s3://b/rank{rank}.json") for rank in (10, 2)]
    assert sorted(urls, key=natural_order) == urls[::-1]


@pytest.mark.slow
def test_an_object_is_read_again_only_when_the_store_says_that_it_changed(bucket: Any, tmp_path: Path) -> None:
    def looked() -> int:
        analyze_files(find_traces([Url("memory://run")]).files, Options(cache=tmp_path / "kept"))
        return len(list((tmp_path / "kept").iterdir()))

    assert [looked(), looked()] == [3, 3]
    bucket.pipe("/run/iteration_10/rank1_trace.json.gz", packed(1, DRAWINGS[1]))  # the same bytes, another version
    assert looked() == 4
    unknown = [Url(str(file)) for file in find_traces([Url("memory://run")]).files]
    analyze_files(unknown, Options(cache=tmp_path / "other"))
    assert not (tmp_path / "other").exists()
