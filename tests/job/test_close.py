"""Closing delivers what is queued, although threads read their queues only now and then."""

import threading

import msgspec
import torch

import pacecar
from pacecar.records import Goodbye, JobRecord, StepRecord


def test_close_writes_the_last_record_and_leaves_no_thread_also_without_a_daemon(tmp_path):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pacer = pacecar.attach(model, optimizer, tune="off", run_dir=tmp_path, socket=str(tmp_path / "nobody"))
    for _ in range(5):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    pacer.close("done")
    records = [
        msgspec.json.decode(line, type=JobRecord) for line in (tmp_path / "rank0.jsonl").read_bytes().splitlines()
    ]
    assert [r.step for r in records if isinstance(r, StepRecord)] == [0, 1, 2, 3, 4]
    assert isinstance(records[-1], Goodbye)
    assert "pacecar-records" not in {thread.name for thread in threading.enumerate()}


class CannotClose:
    dropped = 0

    def put(self, record: object) -> None:
        pass

    def close(self) -> None:  # as a sink's takes seconds, this raises TypeError
        raise AssertionError


def test_a_logger_that_cannot_close_costs_a_warning(tmp_path, caplog):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pacecar.attach(
        model, optimizer, tune="off", run_dir=tmp_path, socket=str(tmp_path / "nobody"), loggers=[CannotClose()]
    ):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert "pacecar could not close CannotClose: TypeError" in caplog.text
    last = (tmp_path / "rank0.jsonl").read_bytes().splitlines()[-1]
    assert isinstance(msgspec.json.decode(last, type=JobRecord), Goodbye), "the others were closed all the same"
