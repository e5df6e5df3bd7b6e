"""Be one user of the machine and do something to the daemon:  python hostile_user.py UID WHAT SOCKET PORT [JOB].

Says "ready" when it is done or holds what it can, and stays until its standard input ends.  Imports come first: the
user may not be able to read the interpreter's files.
"""

import itertools
import os
import socket
import sys
from contextlib import suppress

from pacecar.records import (  # fmt: skip
    DumpRequest,
    Goodbye,
    HangSuspicion,
    JobHello,
    Knobs,
    Ledger,
    Request,
    StepRecord,
    Straggler,
)
from pacecar.wire import encode_frame
from tests.kit.records import decision, verdict

SECOND = 10**9
OPEN = []


def hook(path):
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.connect(path)  # waits where the backlog is full, which it would not with a timeout
    peer.settimeout(60)
    OPEN.append(peer)
    return peer


def hello(**changes):
    given = {
        "job": "hostile", "rank": 0, "local_rank": 0, "world_size": 100_000, "pid": os.getpid(), "host": "h",
        "device": "cpu", "framework": "t", "pacecar_version": "0", "started_wall_ns": 1,
    }  # fmt: skip
    return JobHello(**(given | changes))


def step(job="hostile", number=1, rank=0, knobs=None):
    ledger = Ledger(wall_ns=9, compute_ns=9)
    return StepRecord(
        job=job, rank=rank, step=number, ended_wall_ns=1, wall_ns=9, data_wait_ns=1, forward_ns=1, backward_ns=1,
        optimizer_ns=1, micro_batches=1, samples=1, tokens=1, ledger=ledger, source="estimate",
        calibration_age_steps=None, totals=ledger, total_steps=number, total_samples=number, total_tokens=number,
        overhead_ns=0, total_overhead_ns=0, total_windows=0, dropped_records=0, knobs=Knobs(1, knobs or {}),
    )  # fmt: skip


def hang(job, ended=False):
    return HangSuspicion(
        job=job, rank=0, step=1, phase="forward", wall_ns=1, silent_ns=SECOND, last_collective=None, collectives=None,
        stack=None, ended=ended,
    )  # fmt: skip


def say(peer, *records):
    """Send; a daemon that hangs up, or does not read us for a while, ends it quietly."""
    with suppress(OSError):
        for record in records:
            peer.send(encode_frame(record))


def name(number, length=256):
    return f"{number:06d}".ljust(length, "x")


def get(port, head):
    client = socket.socket()  # not create_connection, which would now import more
    client.settimeout(30)
    client.connect(("127.0.0.1", port))
    OPEN.append(client)
    with suppress(OSError):
        client.sendall(head)
    return client


# --- what it does -----------------------------------------------------------------------------------


def train(path, port, job):
    say(hook(path), hello(job=job, world_size=1), step(job, 41))


def job_names(path, port):
    for number in range(80):
        say(hook(path), hello(job=f"j{number}"))


def departed_job_names(path, port):
    for number in range(300):
        peer = hook(path)
        say(peer, hello(job=f"j{number}"), Goodbye(job=f"j{number}", rank=0, reason="", wall_ns=1))
        peer.close()


def departed_ranks(path, port):
    say(hook(path), hello(rank=0))
    for rank in range(1, 1200):
        peer = hook(path)
        say(peer, hello(rank=rank))
        peer.close()


def knob_names(path, port):
    """Have each name seen: what is written to a page is what a page might remember."""
    peer, job = hook(path), name(0)
    say(peer, hello(job=job))
    fresh = itertools.count()
    for number in range(1000):
        say(peer, step(job, number, knobs={name(next(fresh)): 1 for _ in range(32)}))
        client = get(port, b"GET /metrics?name[]=pacecar_knob_epoch HTTP/1.1\r\nConnection: close\r\n\r\n")
        with suppress(OSError):
            while client.recv(65536):
                pass
        client.close()
        OPEN.remove(client)
    for number in range(1500):
        names = [name(next(fresh)) for _ in range(2)]
        say(peer, decision(number, job="hostile", knob=names[0]), verdict(number, job="hostile", knob=names[1]))


def labels(path, port):
    for number in range(700):
        peer = hook(path)
        job = name(number)
        say(peer, hello(job=job, host=job, device=job, framework=job, backend=job), step(job))
        peer.close()


def decisions(path, port):
    peer = hook(path)
    say(peer, hello())
    for number in range(4000):
        say(peer, decision(number, job="hostile", reason=os.urandom(2000).hex()))


def stragglers(path, port):
    peer = hook(path)
    say(peer, hello())
    for late in range(1000):
        said = os.urandom(2000).hex()
        say(peer, Straggler(
            job="hostile", late_rank=late, cause="compute", phase="forward", since_step=1, step=1, wall_ns=1,
            excess_ns=1, evidence=said,
        ))  # fmt: skip


def hangs(path, port):
    for number in range(40):
        peer, job = hook(path), f"h{number}"
        say(peer, hello(job=job), *[hang(job, ended) for ended in (False, True)] * 10, hang(job))


def connections(path, port):
    for _ in range(600):
        with suppress(OSError):
            hook(path)


def commands(path, port):
    say(hook(path), hello())
    for serial in range(300):
        say(hook(path) if serial % 30 == 0 else OPEN[-1], Request(serial=serial, job="hostile", action="trace"))


def dumps(path, port):
    for serial in range(300):
        say(hook(path) if serial % 30 == 0 else OPEN[-1], DumpRequest(serial=serial, note="\x1b[2J" * 100))


def clients(path, port):
    for _ in range(300):
        with suppress(OSError):
            get(port, b"")


def viewers(path, port):
    for _ in range(64):
        with suppress(OSError):
            get(port, b"GET /api/events HTTP/1.1\r\n\r\n")


def accepts(path, port):
    for number in range(300):
        version = (b"1.x", b"x", b"1.\xff", b"9" * 5000)[number % 4]
        with suppress(OSError):
            client = get(port, b"GET /metrics HTTP/1.1\r\nAccept: text/plain;version=" + version + b"\r\n\r\n")
            client.recv(65536)
            client.close()


def texts(path, port):
    evil = "e\x1b[2Jvil\nWARNING forged\u202e\x9b31m"
    say(hook(path), hello(job=evil, host=evil, device=evil), Goodbye(job="other", rank=0, reason=evil, wall_ns=1))
    say(hook(path), hello(job=evil, rank=1), hang(evil))
    say(hook(path), Request(serial=1, job=evil, action=evil))
    with suppress(OSError):
        get(port, b"GET /\x1b[2J HTTP/1.1\r\n\r\n").recv(65536)


def main():
    uid, what, path, port, *more = sys.argv[1:]
    os.setgroups([])
    os.setgid(int(uid))
    os.setuid(int(uid))
    globals()[what](path, int(port), *more)
    print("ready", flush=True)  # noqa: T201
    sys.stdin.read()


if __name__ == "__main__":
    main()
