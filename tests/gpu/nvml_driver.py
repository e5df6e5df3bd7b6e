"""The driver that a test asks: the GPU's own, or the stand-in library with a stand-in `nvidia-smi` beside it.

The stand-in is built for one GPU and steered by nothing, so that it needs a library path only: a process that loads the
configuration refuses the variable of the control page, PACECAR_STANDIN, as it refuses each PACECAR_ name that is none.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pynvml
import pytest

from tests.monitor.nvml_standin.standin import build, compiler

__all__ = ["STANDIN_FACTS", "Driver", "Smi", "find_driver"]

RECORDED = Path(__file__).parent / "recorded" / "nvidia_smi_h200.xml"

SMI_SECONDS_MAX = 60.0

NO_ANSWERS = ("", "N/A", "None", "[N/A]", "Requested functionality has been deprecated")

STANDIN_FACTS = {
    "/driver_version": "599.77",
    "uuid": "GPU-0",
    "vbios_version": "96.00.00",
    "performance_state": "P1",
    "temperature/gpu_temp": "61 C",
    "utilization/gpu_util": "81 %",
    "gpu_power_readings/average_power_draw": "650.10 W",
    "gpu_power_readings/instant_power_draw": "650.10 W",
    "gpu_power_readings/max_power_limit": "750.40 W",
    "clocks/sm_clock": "1111 MHz",
    "max_clocks/mem_clock": "1921 MHz",
    "pci/pci_gpu_link_info/pcie_gen/current_link_gen": "4",
    "pci/pci_gpu_link_info/link_widths/current_link_width": "8x",
}
"""Path in the XML -> what nvidia-smi would print of the stand-in; all else in the recorded XML is of an H200."""


class Smi:
    """What `nvidia-smi -q -x` printed, of the first GPU."""

    def __init__(self, text: str) -> None:
        self._root = ElementTree.fromstring(text)
        gpu = self._root.find("gpu")
        assert gpu is not None, text[:500]
        self.gpu = gpu

    def text(self, path: str) -> str | None:
        """Return the text at `path` below the GPU (below the root with a slash in front); None for no answer."""
        told = self._root.findtext(path[1:]) if path.startswith("/") else self.gpu.findtext(path)
        told = None if told is None else told.strip()
        return None if told is None or told in NO_ANSWERS else told


@dataclass(frozen=True)
class Driver:
    """How a process asks the driver; `library` is the stand-in's, None: the GPU's own."""

    environ: dict[str, str]
    library: Path | None

    def smi(self) -> Smi:
        """Run `nvidia-smi -q -x`."""
        path = self.environ.get("PATH", "")
        program = shutil.which("nvidia-smi", path=path)
        assert program is not None, f"no nvidia-smi in {path}"
        done = subprocess.run(
            [program, "-q", "-x"], capture_output=True, text=True, timeout=SMI_SECONDS_MAX, check=True, env=self.environ
        )
        return Smi(done.stdout)

    @contextmanager
    def loaded(self, folder: Path) -> Iterator[None]:
        """Let pynvml of this process ask this driver."""
        if self.library is None:
            yield
            return
        before = pynvml.nvmlLib, pynvml._nvmlGetFunctionPointer_cache
        # Another file is another set of globals.
        pynvml.nvmlLib = ctypes.CDLL(str(shutil.copy(self.library, folder)))
        pynvml._nvmlGetFunctionPointer_cache = {}
        try:
            yield
        finally:
            pynvml.nvmlLib, pynvml._nvmlGetFunctionPointer_cache = before


def find_driver(folder: Path, *, is_real: bool) -> Driver:
    """Return the GPU's driver, or a stand-in built in `folder`; skips where there is no C compiler for that."""
    # Each PACECAR_ variable is a setting of pacecar's: one of the tests' own ends every command with code 2.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PACECAR_")}
    if is_real:
        return Driver(environ, None)
    if compiler() is None:
        pytest.skip("no C compiler to build the stand-in driver library with")
    build(folder, gpus=1)
    (folder / "smi.xml").write_text(_standin_xml())
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\nexec cat {folder}/smi.xml\n")
    script.chmod(0o755)
    environ["PATH"] = os.pathsep.join([str(folder), environ.get("PATH", "")])
    paths = [str(folder), environ.get("LD_LIBRARY_PATH", "")]
    environ["LD_LIBRARY_PATH"] = os.pathsep.join(path for path in paths if path)
    return Driver(environ, folder / "libnvidia-ml.so.1")


def _standin_xml() -> str:
    root = ElementTree.fromstring(RECORDED.read_text())
    for path, text in STANDIN_FACTS.items():
        node = root.find(path[1:] if path.startswith("/") else f"gpu/{path}")
        assert node is not None, path
        node.text = text
    return ElementTree.tostring(root, encoding="unicode")
