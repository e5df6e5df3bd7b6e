"""Put odd answers between pynvml and the stand-in: any value of a C type, any code, by function, field or metric.

`OddLibrary` takes the place of the library that pynvml has loaded.  Each call goes to the stand-in first, so handles
stay real, and then the answer is overwritten through the ctypes types that pynvml gave it: what a call returns is
found from its arguments and not from a list, so a call that is new is covered from its first day.  Left alone are
pointers, because no driver answers a pointer that is none, and what the caller asks for (version, field, metric).
"""

import ctypes
import itertools
from collections import Counter
from typing import NamedTuple

INPUTS = frozenset({"version", "fieldId", "scopeId", "metricId", "numMetrics", "fan"})
"""Members of structures by which the caller asks; a driver does not change them."""

SESSION = frozenset({"nvmlInitWithFlags", "nvmlInit_v2", "nvmlShutdown", "nvmlErrorString"})
FREE = frozenset({"nvmlGpmSampleFree", "nvmlEventSetFree"})
"""What these return is ignored, and they write nothing."""

LISTS = {
    "nvmlDeviceGetComputeRunningProcesses_v3": 1,
    "nvmlDeviceGetMPSComputeRunningProcesses_v3": 1,
    "nvmlDeviceGetProcessUtilization": 2,
}
"""Functions that fill a list -> which argument is its length: room there is, and then how many there are."""

INSUFFICIENT_SIZE, FUNCTION_NOT_FOUND = 7, 13
FIELDS, METRICS = "nvmlDeviceGetFieldValues", "nvmlGpmMetricsGet"


class Odd(NamedTuple):
    """One odd answer and to which calls: of `target`, from call `after` on, every `period`-th, at most `times`.

    `target` is a function, or (function, field or metric).  `code` None: success with `bits`, `real` or `text` in
    everything that is returned, by its type; `kind` is the type of a field, `length` that of a list.
    """

    target: str | tuple[str, int]
    code: int | None = None
    bits: int = 0
    real: float = 0.0
    text: bytes = b""
    kind: int = 3
    length: int = 0
    after: int = 0
    period: int = 1
    times: int | None = None

    @property
    def is_refusal(self):
        return self.code is not None

    def hits(self, call):
        """Return whether call number `call` of the target is answered so."""
        turn, rest = divmod(call - self.after, self.period)
        return turn >= 0 and rest == 0 and (self.times is None or turn < self.times)


class OddLibrary:
    """The library for one run.  `victim` is the GPU whose answers are odd, by the driver's index."""

    def __init__(self, library, odd, victim=0):
        self._library = library
        self._odd = {}
        for one in odd:
            self._odd.setdefault(one.target, []).append(one)
        self._victim = victim
        self._counts = {target: itertools.count() for target in self._odd}
        self._gpus = {}
        self._functions = {}
        self.armed = False
        self.asked = Counter()
        """Calls by function, and by (function, field or metric)."""
        self.written = Counter()
        """By the same, how many numbers and texts were in an answer that could have been odd."""
        self.answered = set()
        """Fields and metrics, and (function, GPU), that the stand-in itself answered."""
        self.refused = []
        """The odd answers that were refusals, since the test last looked."""

    def __getattr__(self, name):
        try:
            real = getattr(self._library, name)
        except AttributeError:  # a library that lacks it; that it was looked for counts
            self.asked[name] += 1
            raise
        if name == "nvmlErrorString":
            return real
        if name not in self._functions:
            self._functions[name] = lambda *arguments: self._call(name, real, arguments)
        return self._functions[name]

    def _call(self, name, real, arguments):
        self.asked[name] += 1
        gpu = self._gpu_of(name, arguments)
        one = self._next(name) if gpu in (self._victim, None) else None
        if one is not None and one.is_refusal:
            self.refused.append(one)
            return one.code
        if one is not None and name in LISTS and arguments[1 if LISTS[name] == 2 else 2] is None:
            arguments[LISTS[name]]._obj.value = one.length
            return INSUFFICIENT_SIZE if one.length else 0
        room = arguments[LISTS[name]]._obj.value if name in LISTS else 0
        code = real(*arguments)
        if code != 0:
            return code
        self.answered.add((name, gpu))
        self._remember(name, gpu, arguments)
        if name in (FIELDS, METRICS):
            self._take_parts(name, arguments, is_victim=gpu == self._victim)
        outputs = list(_outputs(arguments))
        self.written[name] += sum(_write(kind, address, Odd(name), dry=True) for kind, address in outputs)
        if one is not None and name in LISTS:
            arguments[LISTS[name]]._obj.value = min(one.length, room)
            outputs = [output for output in outputs if issubclass(output[0], ctypes.Array)]
        if one is not None:
            for kind, address in outputs:
                _write(kind, address, one)
        return 0

    def _next(self, target):
        if not self.armed or target not in self._odd:
            return None
        call = next(self._counts[target])
        return next((one for one in self._odd[target] if one.hits(call)), None)

    def _take_parts(self, name, arguments, *, is_victim):
        """Answer single fields and metrics of a call for many oddly."""
        if name == FIELDS:
            rows = arguments[2]._obj
            parts = ((row.fieldId, row, "nvmlReturn") for row in rows)
        else:
            query = arguments[0]._obj
            parts = ((row.metricId, row, "nvmlReturn") for row in itertools.islice(query.metrics, query.numMetrics))
        for number, row, returned in parts:
            target = name, number
            self.asked[target] += 1
            self.written[target] += 1
            if getattr(row, returned) == 0:
                self.answered.add(target)
            one = self._next(target) if is_victim else None
            if one is None:
                continue
            setattr(row, returned, one.code or 0)
            if one.is_refusal:
                self.refused.append(one)
            elif name == FIELDS:
                row.valueType = one.kind
                ctypes.memmove(ctypes.addressof(row.value), one.bits.to_bytes(8, "little"), 8)
            else:
                row.value = one.real

    def _gpu_of(self, name, arguments):
        """Return the GPU that a call is for; None: for none."""
        if name == "nvmlDeviceGetHandleByIndex_v2":
            return int(arguments[0].value)
        first = arguments[0] if arguments else None
        if name == METRICS:
            return self._gpus.get(first._obj.sample1)
        return self._gpus.get(_address(first))

    def _remember(self, name, gpu, arguments):
        if name == "nvmlDeviceGetHandleByIndex_v2":
            self._gpus[_address(arguments[1]._obj)] = gpu
        elif name == "nvmlDeviceGetMigDeviceHandleByIndex":
            self._gpus[_address(arguments[2]._obj)] = gpu
        elif name in ("nvmlGpmSampleGet", "nvmlGpmMigSampleGet"):
            self._gpus[_address(arguments[-1])] = gpu


def _address(pointer):
    try:
        return ctypes.cast(pointer, ctypes.c_void_p).value
    except ctypes.ArgumentError:
        return None


def _outputs(arguments):
    """Yield (type, address) of everything that a call may write to."""
    for argument in arguments:
        thing = getattr(argument, "_obj", argument if isinstance(argument, ctypes.Array) else None)
        if thing is None or isinstance(thing, ctypes._Pointer):
            continue
        if argument is not thing and isinstance(thing, ctypes.Array) and thing._type_ is ctypes.c_char:
            yield _Raw.of(thing), ctypes.addressof(thing)  # a structure that is read byte by byte
        else:
            yield type(thing), ctypes.addressof(thing)


class _Raw(ctypes.Array):
    """Bytes after a version, of no known type."""

    _type_, _length_ = ctypes.c_uint32, 0

    @staticmethod
    def of(buffer):
        return type("Raw", (_Raw,), {"_type_": ctypes.c_uint32, "_length_": len(buffer) // 4})


def _write(kind, address, one, *, dry=False):
    """Overwrite what is at `address`, by its type; return how many numbers and texts there are."""
    if issubclass(kind, ctypes.Array):
        if kind._type_ is ctypes.c_char:
            text = (one.text + b"\0")[: kind._length_]
            return 1 if dry else bool(ctypes.memmove(address, text, len(text)))
        size, first = ctypes.sizeof(kind._type_), 1 if issubclass(kind, _Raw) else 0
        return sum(_write(kind._type_, address + at * size, one, dry=dry) for at in range(first, kind._length_))
    if issubclass(kind, ctypes.Structure):
        members = [(name, member) for name, member, *_ in kind._fields_ if name not in INPUTS]
        return sum(_write(member, address + getattr(kind, name).offset, one, dry=dry) for name, member in members)
    if issubclass(kind, ctypes._Pointer) or kind in (ctypes.c_void_p, ctypes.c_char_p):
        return 0
    if not dry:
        is_real = kind in (ctypes.c_double, ctypes.c_float)
        value = bytes(kind(one.real)) if is_real else one.bits.to_bytes(8, "little")
        ctypes.memmove(address, value, min(ctypes.sizeof(kind), 8))
    return 1
