"""Build the stand-in driver library and steer it: the control page of nvml.c as a ctypes structure.

Use it from any test, and from a bench or a soak:

    folder = build(some_folder)
    control = Control(folder / "control")
    environ = os.environ | control.environment()      # for a process that loads the real pynvml
"""

import ctypes
import mmap
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent / "nvml.c"
GPUS, FUNCTIONS, EVENTS = 8, 96, 64
NEW, OLD, BEFORE = range(3)
"""How the driver numbers its fields for clock events."""
MIG_H100 = 2
"""`mig` of an H100 with the profiles 1g.10gb, 1g.10gb and 3g.40gb."""
MPS, TIME_SLICING = 1, 2
"""`sharing` of a GPU."""
ALWAYS = 0xFFFFFFFF
HELD_MS = 600_000
"""Longer than any test: a call that is held returns when the test says so, and not when time has passed."""

_names = re.search(r"enum \{(.*?)\}", SOURCE.read_text(), re.DOTALL).group(1)
FUNCTION = {name.strip().removeprefix("F_"): number for number, name in enumerate(_names.split(","))}
"""Function names of nvml.c -> their numbers in the control page."""

u32, u64 = ctypes.c_uint32, ctypes.c_uint64


@cache
def page_type(gpus):
    """Return the type of `control` of nvml.c built for so many GPUs."""

    class Page(ctypes.Structure):
        """`control` of nvml.c."""

        _fields_ = [
            *((name, u32) for name in ("magic", "count", "zero", "driver_missing", "driver_life")),
            *((name, u32) for name in ("mig", "gpm", "nvlink5", "links", "first")),
            *((name, u32) for name in ("fail_function", "fail_gpu", "fail_code", "fail_after", "fail_for")),
            ("hang_ms", u32 * (gpus + 1)),
            ("lost", u32 * gpus),
            ("latency_us", u32),
            ("pcie_bytes", u64 * gpus),
            ("event_head", u32),
            ("event_tail", u32),
            ("event_gpu", u32 * EVENTS),
            ("event_xid", u32 * EVENTS),
            ("reasons", u32 * gpus),
            ("missing", u32 * FUNCTIONS),
            ("calls", (u64 * (gpus + 1)) * FUNCTIONS),
            ("inits", u32),
            ("shutdowns", u32),
            ("hanging", u32),
            ("ecc", u64 * gpus),
            ("link_down", u32 * gpus),
            ("inside", u32),
            ("shutdowns_beside_calls", u32),
            ("void_handles", u32),
            ("fans", u32),
            ("delay_us", u32 * (gpus + 1)),
            ("delay_of", u32 * FUNCTIONS),
            ("jitter_percent", u32),
            ("pcie_generation_max", u32),
            ("one_lock", u32),
            ("driver", u32),
            ("numbering", u32),
            ("held_ns", u64 * gpus),
            ("c2c", u32),
            ("structures", u32),
            ("cost_ns", u32),
            ("field_cost_ns", u32),
            ("idle", u32),
            ("sharing", u32 * gpus),
            ("unprivileged", u32),
        ]  # fmt: skip

    return Page


def compiler():
    """Return a C compiler; None where there is none."""
    return shutil.which("cc") or shutil.which("gcc")


def build(folder, gpus=GPUS):
    """Build libnvidia-ml.so.1 of a node with at most `gpus` GPUs in `folder` and return the folder."""
    library = Path(folder) / "libnvidia-ml.so.1"
    flags = ("-O1", "-Wall", "-Wno-unused-parameter", "-shared", "-fPIC", "-pthread")
    command = [compiler(), *flags, f"-DGPUS={gpus}", "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True, timeout=60)
    return Path(folder)


class Control:
    """The control page in a file, mapped by the test and by the library."""

    def __init__(self, path, gpus=GPUS):
        """`gpus` as the library was built."""
        self.path = Path(path)
        self.gpus = gpus
        page = page_type(gpus)
        if not self.path.exists():
            self.path.write_bytes(bytes(ctypes.sizeof(page)))
        with self.path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.page = page.from_buffer(self._map)
        self.page.count, self.page.gpm, self.page.mig, self.page.links = gpus, 1, 0, 18
        for gpu in range(gpus):
            self.page.reasons[gpu] = 0x1

    def calls(self, gpu):
        """Return function -> calls for that GPU (GPUS: for none), without those never called."""
        counts = {name: int(self.page.calls[number][gpu]) for name, number in FUNCTION.items()}
        return {name: count for name, count in counts.items() if count}

    def calls_in_all(self):
        """Return the calls of all functions, by GPU."""
        return [sum(self.calls(gpu).values()) for gpu in range(self.gpus + 1)]

    def xid(self, gpu, code):
        """Let the event set tell of an Xid."""
        at = self.page.event_head % EVENTS
        self.page.event_gpu[at], self.page.event_xid[at] = gpu, code
        self.page.event_head += 1

    def fail(self, function, code, *, gpu=ALWAYS, after=0, times=ALWAYS):
        """Let `function` (None: any) return `code` for `times` calls after the next `after` ones."""
        page = self.page
        page.fail_function = 0
        page.fail_code, page.fail_gpu, page.fail_after, page.fail_for = code, gpu, after, times
        page.fail_function = ALWAYS if function is None else FUNCTION[function] + 1

    def hold(self, gpu, milliseconds=HELD_MS):
        """Let no call for that GPU (GPUS: for none) return until `release`."""
        self.page.hang_ms[gpu] = milliseconds

    def release(self):
        """Let every call that is held return."""
        for gpu in range(self.gpus + 1):
            self.page.hang_ms[gpu] = 0

    def environment(self):
        """Return the variables for a process that is to load this driver."""
        return {"LD_LIBRARY_PATH": str(self.path.parent), "PACECAR_STANDIN": str(self.path)}
