"""A job that logs into TensorBoard, Weights & Biases (offline) and MLflow; run by test_loggers.py."""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import wandb
from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from turning import OPTIONS
from wandb.proto.wandb_internal_pb2 import Record

import pacecar
from pacecar.adapters.loggers import Mlflow, TensorBoard, Wandb
from tests.kit.records import decision, verdict


class Broken:
    """A writer whose disk is full."""

    def add_scalar(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("planted: this writer is broken")

    add_text = add_scalar


class Hanging:
    """A writer whose file system has gone away."""

    def add_scalar(self, *args: Any, **kwargs: Any) -> None:
        threading.Event().wait()

    add_text = add_scalar


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the one offline run below `folder`, by wandb's own message.

    The file is a LevelDB log behind 7 bytes of header: blocks of 32 KiB of fragments (crc 4, length 2, kind 1).
    """
    data = next(folder.glob("wandb/offline-run-*/*.wandb")).read_bytes()
    at, message, rows = 7, b"", []
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        if left < 7 or kind == 0:
            at += left
            continue
        message = (message if kind in (3, 4) else b"") + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last of several
            record = Record.FromString(message)
            if record.HasField("history"):
                items = record.history.item
                rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    return rows


def main(folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    writer = SummaryWriter(str(folder / "board"))
    run = wandb.init(mode="offline", dir=str(folder), project="test", settings=wandb.Settings(silent=True))
    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    experiment = client.create_experiment("test", artifact_location=str(folder / "artifacts"))
    run_id = client.create_run(experiment).info.run_id
    period = {"period_seconds": 0.05}
    loggers = [
        TensorBoard(writer, **period), Wandb(run, **period), Mlflow(run_id, client=client, **period),
        TensorBoard(Broken(), **period), TensorBoard(Hanging(), **period),
    ]  # fmt: skip
    options = OPTIONS | {"loggers": loggers}
    pacer = pacecar.attach(model, optimizer, tune="exact", **options)
    data = [torch.randn(8, 16) for _ in range(400)]
    for number, batch in enumerate(pacer.data(data)):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.008)
        if number % 100 == 99:
            run.log({"mine": number})  # the script's own rows
        if number == 10:
            for record in (decision(from_value=26214400, to_value=4194304), verdict(measured_gain_ratio=0.07)):
                for logger in loggers:
                    logger.put(record)
    begun = time.monotonic()
    pacer.close()
    close_seconds = time.monotonic() - begun
    writer.close()
    run.finish()
    board = EventAccumulator(str(folder / "board")).Reload()
    texts = [e.tensor_proto.string_val[0].decode() for e in board.Tensors("pacecar/events/text_summary")]
    pace = client.get_metric_history(run_id, "pacecar/step_seconds")
    return {
        "board": {name: [[e.step, e.value] for e in board.Scalars(name)] for name in board.Tags()["scalars"]},
        "board_events": texts,
        "wandb": history(folder),
        "mlflow": [[metric.step, metric.value] for metric in pace],
        "mlflow_events": {k: v for k, v in client.get_run(run_id).data.tags.items() if k.startswith("pacecar")},
        "close_seconds": close_seconds,
        "hanging_dropped": loggers[4].dropped,
        "versions": {name: __import__(name).__version__ for name in ("tensorboard", "wandb", "mlflow")},
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))), flush=True)  # noqa: T201  this is what the test reads
    os._exit(0)
