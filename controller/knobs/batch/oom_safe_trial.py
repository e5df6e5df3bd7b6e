"""Runs a larger micro-batch for the first time where running out of memory costs neither the step nor the job.

First a forecast from the peaks of the sizes that ran says whether it is worth trying (`MemoryForecast`):

    peak(m) = fixed + m * slope        weights, gradients and optimizer state; activations of m samples or tokens

One size gives a bound (as if all of it grew, which is too pessimistic because of the fixed part), two give the line.
Peaks (`max_memory_allocated`; on a CPU the most that the process held, getrusage(2)) only ever grow and belong to the
script, so they are read before and after a larger size ran and never reset.  If the peak did not move, something else
(an evaluation, say) is higher, and there is nothing to learn.  The limit is what this process holds plus what it could
still take (`room`, from the node's daemon), since a neighbour on the device leaves less than its size.  A device
reports that it runs out of memory, so a harmless first run can find out what a guess cannot.  A host kills the process,
so there the pessimistic bound counts as well.  Ignored: fragmentation (the allocator's retries show when it begins to
cost); a container's own limit, whose page cache cannot be told from what is held; a neighbour that grows later.

"Catch the error and try again" works for one rank.  Under DDP a rank that fails inside a synchronizing backward leaves
the others waiting in a collective until the group's timeout, and a generator cannot catch what the body of its loop
raises.  So forward and backward must be called from here (`train_batch`), and a size larger than any before runs first
where it can do no harm:

    switch at a boundary, all ranks      micro-batch 8 -> 16
    next step, all ranks                 scratch: forward and backward of 16 without any collective, undone
                                         did any rank fail?
                    no: the step, at 16         yes: the step, at 8; 16 is barred on all ranks, the tuner is informed

Undone means: the gradients are the same tensors as before, buffers, random numbers and DDP's flags are restored, and
the scaler's scale is only read.  The cache is freed after a failure.

What a process holds grows a little all the time, and the scratch pass has no buffers for collectives.  A device
reports that its memory is full to the allocator, which frees its cache; a host refuses at once.  So on a host the
scratch pass also holds as much as `FULL_RATIO` leaves free.

A size that fitted may still fail later, with longer samples.  Then this rank alone redoes that step at half the size.
It needs no agreement (ranks may cut differently; only the last backward synchronizes) and loses nothing if the
gradients were empty when the step began and no collective is out.  Otherwise the error goes to the script.

Not supported: engines that communicate in forward (FSDP).  A `loss_fn` with its own collectives is the script's risk.
"""

from __future__ import annotations

import gc
import logging
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pacecar.kernel_files.reader import KernelFiles

from .batch_slicing import Given, leaves, samples_in
from .micro_batch import MicroBatcher, MicroBatchLimit
from .micro_batch_eligibility import inexact

__all__ = ["MemoryForecast", "OomSafeTrial", "TrialPeers", "is_out_of_memory", "predict", "unused_bytes"]

SIZES_MAX = 16
"""Most sizes whose peaks are kept: each is larger than the one before, so there are only a few doublings."""

FULL_RATIO = 0.95
"""A predicted peak over this share of the memory is not even tried: an allocator that runs out flushes its cache, and
fragments of it remain."""


def predict(peaks: Mapping[int, int], size: int) -> int | None:
    """Return the peak in bytes expected at `size`, by the line through the two largest sizes; None with fewer."""
    if len(peaks) < 2:
        return None
    small, large = sorted(peaks)[-2:]
    slope = (peaks[large] - peaks[small]) / (large - small)
    return round(peaks[large] + slope * (size - large))


def unused_bytes(device: torch.device) -> int:
    """Return the memory of a CUDA `device` that this process holds and never had in tensors."""
    return max(0, int(torch.cuda.memory_reserved(device)) - int(torch.cuda.max_memory_allocated(device)))


class MemoryForecast:
    """Forecasts for the memory of `device`; none unless it is CUDA or a CPU."""

    def __init__(self, device: torch.device, *, statm: Path = Path("/proc/self/statm")) -> None:
        self._device = device
        self._statm = statm
        self._peaks: dict[int, int] = {}
        self._retries = 0

    def refuse(self, present: int, size: int, room: int | None = None) -> str | None:
        """Learn the peak of the `present` size; return why `size` should not even be tried, or None.

        `room` is what this process could still take beyond what it holds and uses; None: unknown.
        """
        if self._device.type == "cpu":
            return None if room is None else self._refuse_on_host(present, size, room)
        if self._device.type != "cuda":
            return None
        self._learn(present, int(torch.cuda.max_memory_allocated(self._device)))
        self._retries = self._read_retries()
        peak = predict(self._peaks, size)
        total = int(torch.cuda.get_device_properties(self._device).total_memory)
        if room is not None:  # it counts what this process holds and never used
            total = min(total, int(torch.cuda.max_memory_allocated(self._device)) + room)
        if peak is None or peak <= FULL_RATIO * total:
            return None
        return f"it would take {peak / 2**30:.1f} GiB of the device's {total / 2**30:.1f}"

    def is_strained(self, size: int) -> bool:
        """Learn the peak of `size`, which just ran; return whether the allocator had to flush its cache for it."""
        if self._device.type == "cpu":
            self._learn(size, _host_peak_bytes())
        if self._device.type != "cuda":
            return False
        self._learn(size, int(torch.cuda.max_memory_allocated(self._device)))
        return self._read_retries() > self._retries

    def spare_bytes(self) -> int:
        """Return what must stay free on a host beside what this process holds; 0 on a device."""
        held = self._held_bytes() if self._device.type == "cpu" else None
        return round((held or 0) * (1 / FULL_RATIO - 1))

    def _refuse_on_host(self, present: int, size: int, room: int) -> str | None:
        held = self._held_bytes()
        if held is None:
            return None
        most = _host_peak_bytes()
        self._learn(present, most)
        peak = predict(self._peaks, size)
        if peak is None:
            peak = most * size // max(1, present)
        if peak <= FULL_RATIO * (held + room):
            return None
        return f"it may take {peak / 2**30:.1f} GiB where {(held + room) / 2**30:.1f} are to be had"

    def _held_bytes(self) -> int | None:
        """Return what this process holds in memory (proc(5), /proc/PID/statm, the second number)."""
        pages = (KernelFiles().text(self._statm) or "").split()[1:2]
        return int(pages[0]) * resource.getpagesize() if pages and pages[0].isdigit() else None

    def _learn(self, size: int, peak: int) -> None:
        if peak > max(self._peaks.values(), default=-1) and (size in self._peaks or len(self._peaks) < SIZES_MAX):
            self._peaks[size] = peak

    def _read_retries(self) -> int:
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))


def _host_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


logger = logging.getLogger(__name__)

T = TypeVar("T")

SIGNS = (
    "out of memory",  # CUDA's caching allocator and driver, ROCm, XPU
    "can't allocate memory",  # c10's CPU allocator: "DefaultCPUAllocator: can't allocate memory"
    "not enough memory",  # the same on Windows
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""Texts of a plain RuntimeError when memory ran out and torch has no type of its own for that."""

REASON_CHARS_MAX = 200


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` means that memory ran out, the device's or the host's."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)


class TrialPeers:
    """The other ranks, the tuner and the node during a trial; this base class serves a job that is not tuned."""

    def any_rank(self, is_so: bool) -> bool:
        """Return whether `is_so` on any rank; all ranks ask, as all turned at the same boundary."""
        return is_so

    def reverted(self, reason: str) -> None:
        """Report why a size was barred, on all ranks in the same step."""

    def room_bytes(self) -> int | None:
        """Return how much more memory this rank could take; None: unknown."""
        return None


class OomSafeTrial:
    """Runs a batch's micro-batches."""

    def __init__(self, model: nn.Module, batcher: MicroBatcher) -> None:
        self._model = model
        self.batcher = batcher
        parameter = next(model.parameters(), None)
        self._device = parameter.device if parameter is not None else torch.device("cpu")
        self._forecasts = {name: MemoryForecast(self._device) for name in ("micro_batch", "micro_tokens")}
        self._can_redo: bool | None = None
        self._running = 0
        self._is_synchronizing = False
        self.is_used = False
        self._peers = TrialPeers()

    def join(self, peers: TrialPeers) -> None:
        """Use `peers` from now on: the job is tuned."""
        self._peers = peers

    def train_batch(
        self,
        batch: T,
        loss_fn: Callable[[T], Tensor],
        *,
        tokens: Given | None = None,
        count: Given | None = None,
        trim: bool = False,
    ) -> Tensor:
        """Run forward and backward of `batch` in micro-batches; return the batch's loss, detached.

        `loss_fn` is called with each slice and returns its mean loss; the keywords are those of `MicroBatcher.split`.
        Every rank must call this equally often between two optimizer steps.
        """
        self.is_used = True
        how = {"tokens": tokens, "count": count, "trim": trim}
        for name, limit in (("micro_batch", self.batcher.samples), ("micro_tokens", self.batcher.tokens)):
            if limit.is_unproven:
                self._prove(name, limit, lambda: self._largest(batch, how), loss_fn)
        return self._train(batch, loss_fn, how)

    # --- a new size -------------------------------------------------------------------------------------

    def _largest(self, batch: T, how: dict[str, Any]) -> T:
        """Return the slice with the most elements; its weight does not matter for its memory."""
        return max(
            self.batcher.split(batch, **how),
            key=lambda piece: sum(tensor.numel() for _, tensor in leaves(piece)),
        )

    def _prove(
        self, name: str, limit: MicroBatchLimit, largest: Callable[[], Any], loss_fn: Callable[[Any], Tensor]
    ) -> None:
        """Find out whether the size in force fits on all ranks; otherwise go back on all of them."""
        assert limit.value is not None, "the whole batch always counts as proven"
        forecast, size = self._forecasts[name], limit.value
        failure = forecast.refuse(limit.fallback or size, size, self._peers.room_bytes())
        if failure is None:
            failure = self._scratch(largest, loss_fn, forecast.spare_bytes())
            if failure is None and forecast.is_strained(size):
                failure = "the allocator had to flush its cache"
            if failure is not None:
                self._free()
        if not self._peers.any_rank(failure is not None):
            limit.prove()
            return
        barred, back = limit.retreat()
        reason = f"{name} {barred} is barred and {back} in force again: {failure or 'another rank could not run it'}"
        logger.warning("pacecar: %s; the step is not lost", reason)
        self._peers.reverted(reason)

    def _scratch(self, largest: Callable[[], Any], loss_fn: Callable[[Any], Tensor], spare_bytes: int) -> str | None:
        """Run forward and backward only to see whether they fit, with something to spare; return why they failed."""
        try:
            spare = torch.empty(spare_bytes, dtype=torch.uint8)
            with self._undone():
                self.batcher.backward(loss_fn(largest()))
            del spare  # held until here
        except Exception as error:  # noqa: BLE001  the other ranks wait for the answer; an error of the script comes again
            return f"{type(error).__name__}: {str(error).strip()[:REASON_CHARS_MAX]}"
        return None

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Undo everything that runs inside, and keep ranks from waiting for each other meanwhile."""
        ddp = self.batcher.ddp
        is_gated = hasattr(ddp, "require_backward_grad_sync") and hasattr(ddp, "require_forward_param_sync")
        flags = (ddp.require_backward_grad_sync, ddp.require_forward_param_sync) if ddp and is_gated else None
        gradients = [(p, p.grad) for p in self._model.parameters() if p.requires_grad]
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        devices = [self._device] if self._device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices):
                for parameter, _ in gradients:
                    parameter.grad = None
                if ddp is not None:
                    ddp.require_backward_grad_sync = ddp.require_forward_param_sync = False
                yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            if ddp is not None and flags is not None:
                ddp.require_backward_grad_sync, ddp.require_forward_param_sync = flags
            torch.clear_autocast_cache()

    def _free(self) -> None:
        gc.collect()  # a traceback that was kept may hold the activations in a cycle
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    # --- the step ----------------------------------------------------------------------------------------

    def _train(self, batch: T, loss_fn: Callable[[T], Tensor], how: dict[str, Any]) -> Tensor:
        batcher = self.batcher
        was_empty = all(p.grad is None for p in self._model.parameters())
        state = self._random_state()
        while True:
            try:
                return self._pass(batch, loss_fn, how)
            except Exception as error:
                size = self._running
                if not (was_empty and size > 1 and is_out_of_memory(error) and self._may_redo()):
                    raise
                failure = f"{type(error).__name__}: {str(error).strip()[:REASON_CHARS_MAX]}"
            batcher.samples_cap = size // 2
            for parameter in self._model.parameters():
                parameter.grad = None
            if batcher.ddp is not None:
                batcher.ddp.require_forward_param_sync = False  # buffers were sent when the step began
            self._free()
            torch.set_rng_state(state[0])
            if state[1] is not None:
                torch.cuda.set_rng_state(state[1], self._device)
            logger.warning(
                "pacecar: a micro-batch of %d samples did not fit (%s): this rank redoes the step, at %d samples until "
                "the size is turned again",
                size,
                failure,
                batcher.samples_cap,
            )

    def _random_state(self) -> tuple[Tensor, Tensor | None]:
        is_cuda = self._device.type == "cuda"
        return torch.get_rng_state(), torch.cuda.get_rng_state(self._device) if is_cuda else None

    def _may_redo(self) -> bool:
        """Return whether no collective is out that another rank waits for, and a second pass computes the same."""
        if self.batcher.ddp is not None and self._is_synchronizing:
            return False
        if self._can_redo is None:
            self._can_redo = inexact(self._model) is None
        return self._can_redo

    def _pass(self, batch: T, loss_fn: Callable[[T], Tensor], how: dict[str, Any]) -> Tensor:
        total: Tensor | None = None
        slices = self.batcher.split(batch, **how)
        try:
            for micro in slices:
                self._running, self._is_synchronizing = samples_in(micro), False
                loss = loss_fn(micro)
                self._is_synchronizing = self.batcher.is_last
                self.batcher.backward(loss)
                share = loss.detach() * self.batcher.weight
                total = share if total is None else total + share
        finally:
            slices.close()  # type: ignore[attr-defined]
        assert total is not None, "a batch has at least one slice"
        return total
