"""Measures one step's blocks: what each keeps for backward, how long it runs again, whether it computes the same.

Memory and time are measured rather than guessed, because they follow the script's shapes, types and attention:

    bytes    of the storages that autograd saves in the first micro-batch, without parameters, buffers and the block's
             inputs, which a checkpoint keeps as well.  Hooks around the call see every saved tensor and pass it on to
             the hooks outside (the checkpoint's own), so a checkpointed block is measured and still keeps nothing
    time     of the second forwards in backward, which end where the last saved tensor is made; of the first ones, an
             upper bound, where nothing runs twice yet.  On the device's clock if there is one, and as a share of the
             step, because the machine may be slower in other steps

A block that was never checkpointed must show that it computes the same again.  So just before its backward, where a
checkpoint would do it, it runs a second time on copies of its inputs, with random numbers and autocast restored, and
its output and the kinds of tensors that it saves are compared to the bit.  Thereby inputs changed in place, contexts
that ended with forward (an attention backend) and arithmetic that differs from run to run are found and refused.
Refused, too: attributes, buffers or collections in its arguments that forward changes (batch normalization's statistics
would be updated twice), random numbers of Python or numpy, several calls in one forward, inputs that are not tensors or
plain values, and a saved tensor that backward reads twice.

Nothing here raises into forward or backward: an error becomes the reason of a refusal.  Not noticed: a block that
computes something else in later steps, and state that is kept outside modules, such as another generator of torch's.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pacecar.profiler.hook.module_calls import CallObserver, first_tensor, guess_samples, observe_calls
from pacecar.torch_internals import find, need

from ..dataloader.randomness_check import fingerprint
from .blocks import RepeatedBlock

__all__ = ["BlockProbe", "BlockReading"]

PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)

REASON_CHARS_MAX = 120

ITEMS_MAX = 64
"""Items of a collection that are compared; of a longer one the length shows a change, too."""

_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module, among them the parameters, which FSDP2 exchanges in forward."""


@dataclass(slots=True)
class BlockReading:
    """What was measured of one block in one step.

    `kept_bytes` are of its first call, with `elements` in its first tensor, of `samples` samples (None: unknown).
    `again_ns` is what running again takes for all calls, None while unknown.  `refusal` is the first reason against a
    switch.
    """

    name: str
    calls: int = 0
    kept_bytes: int = 0
    elements: int = 0
    samples: int | None = None
    refusal: str | None = None
    was_rehearsed: bool = False
    host_ns: int = 0
    events: list[tuple[Any, Any]] = field(default_factory=list)  # CUDA's, of which torch has no types

    def refuse(self, reason: str) -> None:
        """Note a reason; the first one counts."""
        self.refusal = self.refusal or f"{self.name} {reason}"

    @property
    def again_ns(self) -> int | None:
        """The time in ns; None while the device is not through with it."""
        if not self.events:
            return self.host_ns
        if not all(end.query() for _, end in self.events):
            return None
        return round(sum(float(begin.elapsed_time(end)) for begin, end in self.events) * 1e6)


class BlockProbe:
    """Measures `blocks` of the model `whole` between `open` and `close`, one step apart."""

    def __init__(self, whole: nn.Module, blocks: Sequence[RepeatedBlock], device: torch.device) -> None:
        self._whole = whole
        self._blocks = blocks
        self._device = device
        self._root: CallObserver | None = None
        self._forwards = self._begun_ns = 0
        self.readings = [BlockReading(block.name) for block in blocks]
        self._span: list[Any] = []  # CUDA's events at both ends of the step
        self.spent_ns = 0
        """What measuring cost the job."""
        self._host_ns = 0

    def open(self) -> None:
        """Begin to measure."""
        for block, reading in zip(self._blocks, self.readings, strict=True):
            block.set_around(self._measured(block, reading))
        self._root = observe_calls(self._whole, after=self._count_forward)
        self._begun_ns = time.monotonic_ns()
        self._span = [self._mark()]

    def close(self) -> None:
        """Stop measuring and judge."""
        self._span.append(self._mark())
        self._host_ns = time.monotonic_ns() - self._begun_ns - self.spent_ns
        for block in self._blocks:
            block.set_around(None)
        if self._root is not None:
            self._root.remove()
        for block, reading in zip(self._blocks, self.readings, strict=True):
            if reading.calls != self._forwards or not reading.calls:
                reading.refuse(f"was called {reading.calls} times in {self._forwards} forwards of the model")
            elif not reading.kept_bytes:
                reading.refuse("keeps nothing for backward but its inputs")
            elif not block.is_checkpointed_at_home and not reading.was_rehearsed:
                reading.refuse("did not take part in backward")

    def again_ratio(self) -> float | None:
        """Return the share of the step in which blocks run again; None while the device is not through with it.

        The device's step counts where it is longer: a loop that reads nothing back runs ahead of its device.
        """
        again = [reading.again_ns for reading in self.readings]
        known = [one for one in again if one is not None]
        if len(known) < len(again):
            return None
        step_ns = self._host_ns
        if None not in self._span:
            begin, end = self._span
            if not end.query():
                return None
            ran_ns = sum(one / r.calls for one, r in zip(known, self.readings, strict=True) if r.was_rehearsed)
            step_ns = max(step_ns, round(begin.elapsed_time(end) * 1e6 - ran_ns))
        return sum(known) / max(1, step_ns)

    def _mark(self) -> Any:  # noqa: ANN401  CUDA's event, of which torch has no types
        """Return an event that the device passes now; None without CUDA."""
        if self._device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return None
        kind: Any = torch.cuda.Event
        event = kind(enable_timing=True)
        event.record()
        return event

    def _count_forward(self, *_: object) -> None:
        self._forwards += torch.is_grad_enabled()

    def _measured(self, block: RepeatedBlock, reading: BlockReading) -> Any:  # noqa: ANN401  an Around
        run = block.transformed(lambda function: self._counted(block, reading, function))

        def around(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
            if not torch.is_grad_enabled() or _is_in_backward():
                return call(*args, **kwargs)
            reading.calls += 1
            is_first = reading.calls == 1
            before = self._state(block, reading, args, kwargs) if is_first else {}
            with nullcontext() if block.is_checkpointed_at_home else self._timed(reading):
                output = run(call, args, kwargs)
            after = self._state(block, reading, args, kwargs) if is_first else {}
            changed = next((key for key in before.keys() | after.keys() if _differ(before, after, key)), None)
            if changed is not None:
                reading.refuse(f"changes {changed} in forward")
            return output

        return around

    @contextmanager
    def _timed(self, reading: BlockReading) -> Iterator[None]:
        begin = self._mark()
        begun_ns = time.monotonic_ns() - self.spent_ns
        try:
            yield
        finally:
            reading.host_ns += time.monotonic_ns() - self.spent_ns - begun_ns
            end = None if begin is None else self._mark()
            if end is not None:
                reading.events.append((begin, end))

    def _state(
        self, block: RepeatedBlock, reading: BlockReading, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, object]:
        """Return what a forward could change and no checkpoint restores.

        Attributes, buffers, collections that it is called with, random numbers.
        """
        state: dict[str, object] = {}
        begun_ns = time.monotonic_ns()
        try:
            state["the random numbers of Python or numpy"] = fingerprint(with_torch=False)
            for place, value in chain(enumerate(args), kwargs.items()):
                if not isinstance(value, Tensor):  # whether those changed shows when the block runs again
                    state |= _contents(f"its argument {place}", value)
            for name, part in block.inner.named_modules():
                own = f"its {name}." if name else "its "
                state |= {own + key: value for key, value in vars(part).items()}
                for key, value in vars(part).items():
                    if key not in _OF_TORCH:
                        state |= _contents(own + key, value)
                for key, buffer in part.named_buffers(recurse=False):
                    state |= {own + key: buffer, **_contents(own + key, buffer)}
        except Exception as error:  # noqa: BLE001  as said above
            reading.refuse(f"has a state that cannot be read ({_short(error)})")
        self.spent_ns += time.monotonic_ns() - begun_ns
        return state

    def _counted(self, block: RepeatedBlock, reading: BlockReading, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with everything measured that it saves, or its time when it runs again in backward."""

        def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  whatever the block's forward is
            if _is_in_backward():
                with self._timed(reading):
                    return function(*args, **kwargs)
            if reading.calls > 1:
                return function(*args, **kwargs)
            begun_ns = time.monotonic_ns()
            saved = _SavedTensors(reading)
            again = None
            with ExitStack() as stack:
                try:
                    saved.leave_out([*block.inner.parameters(), *block.inner.buffers(), *_tensors((args, kwargs))])
                    if not block.is_checkpointed_at_home:
                        if saved.outside is not None:
                            reading.refuse("is inside a checkpoint or other hooks that decide what backward keeps")
                        if first_tensor(args) is None and first_tensor(kwargs) is not None:
                            reading.refuse("gets its tensors by keyword, whose device's random state is not restored")
                        again = _Rehearsal(function, args, kwargs, self._device)
                    stack.enter_context(saved_tensors_hooks(saved.pack, saved.unpack))
                except Exception as error:  # noqa: BLE001  as said above
                    reading.refuse(f"cannot be measured ({_short(error)})")
                self.spent_ns += time.monotonic_ns() - begun_ns
                output = function(*args, **kwargs)
            begun_ns = time.monotonic_ns()
            reading.kept_bytes, reading.samples = saved.take_bytes(), guess_samples((args, kwargs))
            reading.elements = elements_in((args, kwargs))
            if again is not None and reading.refusal is None:
                self._rehearse_in_backward(reading, again, output, saved.kinds)
            self.spent_ns += saved.spent_ns + time.monotonic_ns() - begun_ns
            return output

        return run

    def _rehearse_in_backward(
        self, reading: BlockReading, again: _Rehearsal, output: object, kinds: Sequence[object]
    ) -> None:
        """Have the block run again when its backward begins, and compare."""
        results = list(_tensors(output))
        first: Any = next((tensor for tensor in results if tensor.requires_grad), None)
        if first is None:
            return
        expected = [tensor.detach() for tensor in results]  # without the graph, which will hold this function

        def rehearse(_: Tensor) -> None:
            begun_ns = time.monotonic_ns()
            reading.was_rehearsed = True
            try:
                if reading.refusal is None and not again.gives(expected, kinds, _SavedTensors(reading, drops=True)):
                    reading.refuse("computes or saves something else when it runs again in backward")
            except Exception as error:  # noqa: BLE001  as said above; out of memory, too
                reading.refuse(f"cannot run again in backward ({_short(error)})")
            expected.clear()
            again.forget()
            self.spent_ns += time.monotonic_ns() - begun_ns

        first.register_hook(rehearse)


def elements_in(inputs: object) -> int:
    """Return the elements of the first tensor of a block's inputs, with which its activations grow; 0 without one."""
    first = first_tensor(inputs)
    return 0 if first is None else first.numel()


class _SavedTensors:
    """Adds up what autograd saves, and passes it on; with `drops`, keeps nothing, where no backward follows."""

    def __init__(self, reading: BlockReading, *, drops: bool = False) -> None:
        self._reading = reading
        self._drops = drops
        self._known: set[int] = set()
        self._bytes = 0
        self._storages: dict[int, Any] = {}  # held until the call ends, or addresses would come twice
        self.outside: Any = need("torch._C._autograd._top_saved_tensors_default_hooks")(False)
        self.spent_ns = 0
        self.kinds: list[object] = []
        """Shape, type and device of each saved tensor, in order."""

    def leave_out(self, tensors: Sequence[Tensor]) -> None:
        """Do not count the storages of `tensors`."""
        self._known |= {_address(tensor) for tensor in tensors if _is_plain(tensor)}

    def pack(self, tensor: Tensor) -> object:
        """Count `tensor`; return what stands for it until `unpack`."""
        begun_ns = time.monotonic_ns()
        try:
            self.kinds.append((tensor.shape, tensor.dtype, tensor.device))
            if not _is_plain(tensor):
                self._reading.refuse(f"saves a {type(tensor).__name__}, whose memory is not known")
            elif not self._drops and _address(tensor) not in self._known:
                storage = tensor.untyped_storage()
                self._bytes += 0 if storage.data_ptr() in self._storages else storage.nbytes()
                self._storages[storage.data_ptr()] = storage
        except Exception as error:  # noqa: BLE001  as said above
            self._reading.refuse(f"saves what cannot be measured ({_short(error)})")
        self.spent_ns += time.monotonic_ns() - begun_ns
        if self._drops:
            return None
        return [0, tensor.detach() if self.outside is None else self.outside[0](tensor)]

    def unpack(self, packed: Any) -> Any:  # noqa: ANN401  what `pack` returned
        """Return the tensor that `packed` stands for."""
        packed[0] += 1
        if packed[0] > 1:
            self._reading.refuse("has a saved tensor that backward reads twice")
        return packed[1] if self.outside is None else self.outside[1](packed[1])

    def take_bytes(self) -> int:
        """Return the sum, and let go of what was held."""
        self._storages.clear()
        return self._bytes


class _Rehearsal:
    """Runs a block again as a checkpoint would: random numbers and autocast as they are when this is made."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
    ) -> None:
        self._call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None = (function, args, kwargs)
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._random = torch.get_rng_state(), torch.cuda.get_rng_state(device) if self._is_cuda else None
        self._autocast = functools.partial(
            torch.autocast,
            device.type,
            enabled=torch.is_autocast_enabled(device.type),
            dtype=torch.get_autocast_dtype(device.type),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )

    def gives(self, expected: Sequence[Tensor], kinds: Sequence[object], saved: _SavedTensors) -> bool:
        """Return whether it computes `expected` to the bit and saves tensors of `kinds`.

        Raises:
            Exception: whatever the block raises, or an input cannot be copied.
        """
        assert self._call is not None, "it runs once"
        function, args, kwargs = self._call
        devices = [self._device] if self._is_cuda else []
        with torch.random.fork_rng(devices), torch.enable_grad(), self._autocast():
            torch.set_rng_state(self._random[0])
            if self._random[1] is not None:
                torch.cuda.set_rng_state(self._random[1], self._device)
            with saved_tensors_hooks(saved.pack, saved.unpack):
                output = function(*_copy(args), **_copy(kwargs))
        results = list(_tensors(output))
        is_equal = len(results) == len(expected) and all(map(torch.equal, results, expected))
        return is_equal and saved.kinds == kinds

    def forget(self) -> None:
        """Let go of the inputs."""
        self._call = None


def _is_in_backward() -> bool:
    task: Callable[[], int] | None = find("torch._C._current_graph_task_id")
    return task is not None and task() != -1


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _contents(name: str, value: object) -> dict[str, object]:
    """Return what changes when `value` is changed in place: a tensor's version, a collection's length and items."""
    if isinstance(value, Tensor):
        return {f"{name} (version)": value._version}
    if not isinstance(value, (list, dict, set, deque)):
        return {}
    items = value.values() if isinstance(value, dict) else value
    found = {f"{name}[{at}]": item for at, item in enumerate(islice(items, ITEMS_MAX))}
    return {**found, f"{name} (length)": len(value)}


def _differ(before: Mapping[str, object], after: Mapping[str, object], key: str) -> bool:
    old, new = before.get(key), after.get(key)
    return old is not new and not (isinstance(old, PLAIN) and old == new)


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)


def _copy(value: Any) -> Any:  # noqa: ANN401  a block's inputs
    """Return a copy of nested tuples, lists and dicts of tensors and plain values.

    Raises:
        TypeError: there is something else in it, which may have changed.
    """
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) in (list, tuple):
        return type(value)(_copy(part) for part in value)
    if type(value) is dict:
        return {key: _copy(part) for key, part in value.items()}
    if value is None or isinstance(value, PLAIN):
        return value
    raise TypeError(f"it is called with a {type(value).__name__}")


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:REASON_CHARS_MAX]}"
