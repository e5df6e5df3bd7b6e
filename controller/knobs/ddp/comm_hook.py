"""Compresses DDP's gradients in one communication hook: bf16 or fp16 rounding, top-k with error feedback, PowerSGD.

A Reducer takes one hook, once, so one hook serves all choices and its state says which one is meant:

    bf16, fp16   half the bytes.  Divided by the ranks before the sum as torch's own hooks do, so that fp16 does not
                 overflow in the sum; torch's bf16 hook refuses gloo by name, the arithmetic does not.
    topk         the largest share of a bucket's values with their places, gathered from all ranks; what was left out
                 is kept and added next time (error feedback: Seide et al. 2014, Stich et al. 2018; a threshold from a
                 sample: Lin et al. 2018, Deep Gradient Compression).
    powersgd     torch's PowerSGD (Vogels et al. 2019).  NCCL only: on gloo it deadlocks with more than one bucket.

"None" is not among them, because a hook that changes nothing still changes the last bit.  Without a hook the Reducer
multiplies by 1/ranks while it copies a gradient, or divides in place if the gradient is a view.  A hook sees the
undivided bucket and cannot tell which it would have been, so at 3 ranks its last bit differs.  No compression therefore
means no hook.

Residuals belong to parameters, not to buckets, so they survive a change of the buckets.  PowerSGD's state belongs to
buckets and starts again with them.  A non-finite gradient is passed on, so that every rank sees it, and never kept as a
residual.

Not supported: momentum correction and warm-up of the ratio (DGC), quantization below 16 bits, sparse gradients
(refused).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from pacecar.controller.foreach_ops import add_each

__all__ = ["SAMPLE_MAX", "Choice", "Compressor", "sent_by_gather", "sent_by_reduce", "topk_count"]

Choice = Literal["bf16", "fp16", "powersgd", "topk"]

SAMPLE_MAX = 16_384
"""Values of a bucket that its threshold is estimated from: choosing among all takes 9 ms for 1 M values on a CPU core,
the estimate and one pass 1.7 ms."""

INDEX_MAX = 2**31 - 1
"""Places are sent as 32-bit integers; a larger bucket is sent as it is."""

POWERSGD_START = 2
"""PowerSGD begins in the second iteration, after DDP has rebuilt its buckets; torch refuses less."""

Bucket = Any
"""A torch.distributed.GradBucket, which torch does not type."""

_c10d: Any = dist
"""torch.distributed, including what it does not type."""

_gather = getattr(_c10d, "all_gather_single", None) or _c10d.all_gather_into_tensor
"""torch 2.13 renamed it and warns about the old name."""


def sent_by_reduce(payload_bytes: int, ranks: int) -> int:
    """Return what a rank sends in a ring all-reduce: 2(n-1)/n of the payload (nccl-tests' factor)."""
    return 2 * (ranks - 1) * payload_bytes // ranks


def sent_by_gather(payload_bytes: int, ranks: int) -> int:
    """Return what a rank sends in a ring all-gather of `payload_bytes` from each: n-1 times that."""
    return (ranks - 1) * payload_bytes


def topk_count(numel: int, ratio: float) -> int:
    """Return how many of `numel` values are sent."""
    return max(1, round(numel * ratio))


class Compressor:
    """The hook's state on one rank.

    `dense_bytes` and `sent_bytes` add up what a ring would have sent uncompressed and what it sends, since the
    compressor was made; `buckets` counts.  PowerSGD's share comes from its own statistics.
    """

    def __init__(self, choice: Choice, group: Any, *, topk_ratio: float, powersgd_rank: int) -> None:  # noqa: ANN401
        self.choice: Choice = choice
        self.group = group
        self.ranks = dist.get_world_size(group)
        self.topk_ratio = topk_ratio
        self.powersgd_rank = powersgd_rank
        self.powersgd: Any = None
        self.powersgd_hook: Any = None
        self.residuals: dict[Tensor, Tensor] = {}
        self.dense_bytes = 0
        self.sent_bytes = 0
        self.buckets = 0

    def renew(self) -> None:
        """Reset PowerSGD for new buckets: its state of the old ones would be added to the wrong parameters."""
        self.powersgd = None
        if self.choice == "powersgd":
            # Imported here and not in the hook, which runs inside the job's backward.
            from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

            self.powersgd_hook = powerSGD_hook
            self.powersgd = PowerSGDState(
                self.group, matrix_approximation_rank=self.powersgd_rank, start_powerSGD_iter=POWERSGD_START
            )

    @staticmethod
    def hook(state: Compressor, bucket: Bucket) -> Future[Tensor]:
        """Reduce one bucket to its mean over the ranks."""
        state.buckets += 1
        flat = bucket.buffer()
        state.dense_bytes += sent_by_reduce(flat.numel() * flat.element_size(), state.ranks)
        return _ARITHMETIC[state.choice](state, bucket)


def _half(dtype: torch.dtype) -> Callable[[Compressor, Bucket], Future[Tensor]]:
    def reduce(state: Compressor, bucket: Bucket) -> Future[Tensor]:
        flat = bucket.buffer()
        rounded = flat.to(dtype).div_(state.ranks)
        state.sent_bytes += sent_by_reduce(rounded.numel() * rounded.element_size(), state.ranks)

        def widen(future: Future[list[Tensor]]) -> Tensor:
            widened: Tensor = flat.copy_(future.value()[0])
            return widened

        return _all_reduce(state, rounded).then(widen)

    return reduce


def _all_reduce(state: Compressor, tensor: Tensor) -> Future[list[Tensor]]:
    work: Any = dist.all_reduce(tensor, group=state.group, async_op=True)
    future: Future[list[Tensor]] = work.get_future()
    return future


def _dense(state: Compressor, bucket: Bucket) -> Future[Tensor]:
    flat = bucket.buffer().div_(state.ranks)
    state.sent_bytes += sent_by_reduce(flat.numel() * flat.element_size(), state.ranks)
    return _all_reduce(state, flat).then(lambda future: future.value()[0])


def _powersgd(state: Compressor, bucket: Bucket) -> Future[Tensor]:
    memory, flat = state.powersgd, bucket.buffer()
    before = memory.total_numel_after_compression
    is_compressed = memory.iter >= memory.start_powerSGD_iter
    future: Future[Tensor] = state.powersgd_hook(memory, bucket)
    numel = memory.total_numel_after_compression - before if is_compressed else flat.numel()
    state.sent_bytes += sent_by_reduce(numel * flat.element_size(), state.ranks)
    return future


def _topk(state: Compressor, bucket: Bucket) -> Future[Tensor]:
    flat = bucket.buffer()
    numel = flat.numel()
    if numel > INDEX_MAX:
        return _dense(state, bucket)
    gradients, parameters = bucket.gradients(), bucket.parameters()
    kept = [(g, state.residuals[p]) for g, p in zip(gradients, parameters, strict=True) if p in state.residuals]
    if kept:
        add_each([g for g, _ in kept], [r for _, r in kept])
    count = topk_count(numel, state.topk_ratio)
    places = _largest(flat, count)
    values = flat[places]
    _keep_rest(state, flat, places, gradients, parameters)
    sent = torch.empty(2 * count, dtype=torch.int32, device=flat.device)
    sent[:count] = places
    sent[count:] = values.float().view(torch.int32)
    everyone = torch.empty(state.ranks * 2 * count, dtype=torch.int32, device=flat.device)
    state.sent_bytes += sent_by_gather(sent.numel() * sent.element_size(), state.ranks)
    work: Any = _gather(everyone, sent, group=state.group, async_op=True)

    def add_up(_: Future[Any]) -> Tensor:
        if everyone.is_cuda:  # this runs on a stream that the allocator does not know of
            everyone.record_stream(torch.cuda.current_stream(everyone.device))
        # Rank by rank, so that all ranks add in one order and hold the same bits.
        mean: Tensor = flat.zero_()
        for theirs in everyone.view(state.ranks, 2, count):
            mean.index_add_(0, theirs[0].long(), theirs[1].view(torch.float32).to(flat.dtype))
        return mean.div_(state.ranks)

    result: Future[Tensor] = work.get_future().then(add_up)
    return result


def _largest(flat: Tensor, count: int) -> Tensor:
    """Return `count` different places of values that are large by magnitude: on a CPU nearly the largest.

    On a device exactly the largest: a threshold would have to wait for the device to know how many exceed it.
    """
    size = flat.abs()
    stride = size.numel() // SAMPLE_MAX
    if stride < 2 or flat.device.type != "cpu":
        return size.topk(count, sorted=False).indices
    sample = size[::stride]
    threshold = sample.topk(topk_count(sample.numel(), count / size.numel()), sorted=False).values.min()
    found = (size >= threshold).nonzero().view(-1)
    if found.numel() < count:  # ties, not-a-number, or a sample that missed: rare, so it may be slow
        return size.topk(count, sorted=False).indices
    return found[size[found].topk(count, sorted=False).indices]


def _keep_rest(
    state: Compressor, flat: Tensor, places: Tensor, gradients: list[Tensor], parameters: list[Tensor]
) -> None:
    """Keep what is not sent, by parameter; infinities and not-a-number are never kept."""
    flat[places] = 0
    torch.nan_to_num_(flat, nan=0.0, posinf=0.0, neginf=0.0)
    for gradient, parameter in zip(gradients, parameters, strict=True):
        residual = state.residuals.get(parameter)
        if residual is None:
            state.residuals[parameter] = gradient.clone()
        else:
            residual.copy_(gradient)


_ARITHMETIC: dict[Choice, Callable[[Compressor, Bucket], Future[Tensor]]] = {
    "bf16": _half(torch.bfloat16),
    "fp16": _half(torch.float16),
    "powersgd": _powersgd,
    "topk": _topk,
}
