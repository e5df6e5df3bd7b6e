"""Callbacks that do nothing, and one that saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Callback:
    def _nothing(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        pass

    on_train_start = on_train_end = on_train_batch_start = on_train_batch_end = on_train_epoch_end = _nothing
    on_exception = _nothing


class ModelCheckpoint(Callback):
    def __init__(self, folder: str, *, every_n_train_steps: int, save_top_k: int, filename: str) -> None:
        self.folder, self.every, self._last = Path(folder), every_n_train_steps, 0

    def on_train_start(self, trainer: Any, *args: Any) -> None:
        self._last = trainer.global_step  # of a resumed run: it is on disk, and others may still read it

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        step = trainer.global_step
        if step != self._last and step % self.every == 0:
            trainer.save_checkpoint(self.folder / f"step={step}.ckpt")
        self._last = step
