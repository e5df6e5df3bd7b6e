"""Measures `pacecar analyze` of many ranks' traces in an object store, read by a dask cluster of two workers.

The store is moto's server on this machine, which stands for S3; the traces are those of `bench_ranks.py` (DDP, a host
for every eight ranks, 20 steps and 21 000 events a rank).  Each number of ranks is analyzed twice, the second time with
the answers of the first (`--cache`).  Peak memory is the kernel's, of this command and of each worker.  The smallest
number is also analyzed from local files, and must give the same bytes.

    pip install 'moto[server]' s3fs
    python bench/bench_trace_cluster.py --folder TRACES --ranks 64 512 2000

TRACES is made (`bench_ranks.py --write TRACES --jobs 2000x20`, some 20 minutes) and may be used again.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

BUCKET = "traces"

WORKERS = 2

WAIT_SECONDS = 60.0


class Spent(NamedTuple):
    """What a command printed, how long it took, and the most memory it had."""

    printed: bytes
    seconds: float
    peak_bytes: int


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="the traces, made if there are none")
    parser.add_argument("--upload", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512, 2000])
    args = parser.parse_args(words)
    args.folder.mkdir(exist_ok=True)
    if not any(args.folder.iterdir()):
        job = f"{max(args.ranks)}x20"
        write = [sys.executable, str(ROOT / "bench" / "bench_ranks.py"), "--write", str(args.folder), "--jobs", job]
        subprocess.run(write, check=True, stdout=subprocess.DEVNULL)
    paths = sorted(args.folder.iterdir(), key=lambda path: (len(path.name), path.name))
    if len(paths) < max(args.ranks):
        raise SystemExit(f"{args.folder} has the traces of {len(paths)} ranks only")
    if args.upload:
        upload(paths, args.ranks, args.upload)
    else:
        measure(paths, sorted(args.ranks))


def measure(paths: Sequence[Path], counts: Sequence[int]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Processes of their own: a child inherits its parent's peak memory.
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    endpoint = f"http://127.0.0.1:{port}"
    store = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ.update(store, FSSPEC_S3_ENDPOINT_URL=endpoint)
    try:
        words = ["--folder", str(paths[0].parent), "--upload", endpoint, "--ranks", *map(str, counts)]
        subprocess.run([sys.executable, __file__, *words], check=True)
        for count in counts:
            if not one(paths[:count], f"s3://{BUCKET}{count}/", is_compared=count == counts[0]):
                sys.exit("not the same bytes")
    finally:
        server.terminate()
        server.wait()


def upload(paths: Sequence[Path], counts: Sequence[int], endpoint: str) -> None:
    import s3fs

    bucket = s3fs.S3FileSystem(endpoint_url=endpoint)
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            bucket.ls("")
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
    for count in counts:
        bucket.mkdir(f"{BUCKET}{count}")
        bucket.put([str(path) for path in paths[:count]], f"{BUCKET}{count}/")


def one(paths: Sequence[Path], url: str, *, is_compared: bool) -> bool:
    """Analyze `url` twice, print what that took, and return whether all documents are equal to the byte."""
    from distributed import LocalCluster

    size = sum(path.stat().st_size for path in paths)
    with (
        tempfile.TemporaryDirectory(prefix="pacecar-bench-", dir="/var/tmp") as folder,
        LocalCluster(n_workers=WORKERS, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
    ):
        wanted = ["--engine", "dask", "--dask-address", cluster.scheduler_address, "--cache", f"{folder}/cache"]
        first, second = (analyze([url, *wanted], os.environ) for _ in range(2))
        workers = [_peak_bytes(worker.pid) for worker in cluster.workers.values()]
    for word, spent in (("first", first), ("again", second)):
        mb = " ".join(f"{peak / 1e6:.0f}" for peak in workers)
        sys.stdout.write(
            f"{len(paths)} ranks, {size / 1e6:.0f} MB packed, {word}: {spent.seconds:.1f} s, peak"
            f" {spent.peak_bytes / 1e6:.0f} MB, of the workers {mb} MB, {len(spent.printed) / 1e6:.1f} MB of JSON\n"
        )
    is_same = first.printed == second.printed
    sys.stdout.write(f"  the second is equal to the byte: {is_same}\n")
    if is_compared:
        local = analyze([*map(str, paths)], os.environ)
        found = first.printed.replace(url.rstrip("/").encode(), str(paths[0].parent).encode())
        sys.stdout.write(f"  from files, with the same names: equal to the byte: {found == local.printed}\n")
        is_same = is_same and found == local.printed
    sys.stdout.flush()
    return is_same


def analyze(words: Sequence[str], environment: Mapping[str, str]) -> Spent:
    begun = time.perf_counter()
    command = [sys.executable, "-m", "pacecar", "analyze", *words, "--json", "-q"]
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(command, stdout=printed, cwd=ROOT, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"pacecar analyze ended with {process.returncode}")
        printed.seek(0)
        return Spent(printed.read(), time.perf_counter() - begun, usage.ru_maxrss * 1024)


def _peak_bytes(pid: int) -> int:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
