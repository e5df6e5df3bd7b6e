"""Reads the place of GPUs and network cards on the PCI bus: links, bridges, NUMA nodes, IOMMU and access control (ACS).

    pci0000:15 / 0000:15:01.0 / 0000:16:00.0 / 0000:17:00.0 / 0000:18:00.0     host bridge, ports, the card

The path in /sys/devices is the tree, so the longest common prefix of two paths is the nearest common port.  A link is
as fast as the slower of its ends; `max_link_speed` of the card alone would flag every card in an older slot.

Source: Documentation/ABI/testing/sysfs-bus-pci and sysfs-kernel-iommu_groups; PCI Express Base Specification, "ACS
Extended Capability" (ID 0x000D, control register at offset 6: bit 2 request redirect, bit 3 completion redirect), whose
numbers are in include/uapi/linux/pci_regs.h.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from pacecar.kernel_files.processors import parse_cpu_list

from ..host_access import FactReader
from .model import ACCELERATOR, DISPLAY, NETWORK, PciDevice, Seen

__all__ = ["address_of", "pci_devices", "pci_key"]

DEVICES_MAX = 1024
CONFIG_BYTES = 4096
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ACS, _REDIRECTS = 0x000D, 0x0C
_EXTENDED = 0x100
_CAPABILITIES_MAX = 64


def pci_key(text: str) -> str:
    """Return NVML's `00000000:1B:00.0` as sysfs writes it, `0000:1b:00.0`."""
    domain, _, rest = text.strip().lower().partition(":")
    try:
        return f"{int(domain, 16):04x}:{rest}"
    except ValueError:
        return text.lower()


def address_of(link: Path) -> str | None:
    """Return the PCI address that a `device` link leads to, None if it is not a PCI device."""
    name = os.path.basename(os.path.realpath(link))
    return name if _ADDRESS.fullmatch(name) else None


def pci_devices(reader: FactReader) -> tuple[PciDevice, ...]:
    """Read GPUs, accelerators and network cards, with the bridges above them."""
    folder = reader.access.sys / "bus/pci/devices"
    found: list[PciDevice] = []
    for address in reader.names(folder)[:DEVICES_MAX]:
        kind = reader.parsed(folder / address / "class", lambda text: int(text, 16))
        if kind is None or kind.value >> 16 not in (DISPLAY, NETWORK, ACCELERATOR):
            continue
        vendor = reader.parsed(folder / address / "vendor", lambda text: int(text, 16))
        if vendor is not None:
            found.append(_device(reader, folder, address, vendor.value, kind.value))
    return tuple(found)


def _device(reader: FactReader, folder: Path, address: str, vendor: int, kind: int) -> PciDevice:
    place = folder / address
    path = _path(place)
    ends = [place] if len(path) < 3 else [place, folder / path[-2]]
    speeds = [reader.parsed(end / "max_link_speed", _speed) for end in ends]
    widths = [reader.number(end / "max_link_width") for end in ends]
    node = reader.number(place / "numa_node")
    cpus = reader.parsed(place / "local_cpulist", parse_cpu_list)
    width = reader.number(place / "current_link_width")
    speed = reader.parsed(place / "current_link_speed", _speed)
    known_speeds = [seen.value for seen in speeds if seen is not None and seen.value is not None]
    known_widths = [seen.value for seen in widths if seen is not None and 0 < seen.value < 64]
    return PciDevice(
        address=address,
        vendor=vendor,
        kind=kind,
        where=str(place),
        driver=_driver(place / "driver"),
        path=path,
        node=None if node is None or node.value < 0 else node.value,  # the kernel's "no NUMA here" is -1
        local_cpus=None if cpus is None or not cpus.value else cpus.value,
        speed=None if speed is None else speed.value,
        speed_max=min(known_speeds, default=None),
        width=width.value if width is not None and 0 < width.value < 64 else None,
        width_max=min(known_widths, default=None),
        iommu_domain=reader.word(place / "iommu_group/type"),
        redirects=_redirects(reader, folder, path),
    )


def _driver(link: Path) -> str | None:
    try:
        return os.path.basename(os.readlink(link))
    except OSError:
        return None


def _path(place: Path) -> tuple[str, ...]:
    """Return the parts of the real path from the host bridge to the device."""
    parts = Path(os.path.realpath(place)).parts
    start = next((at for at, part in enumerate(parts) if re.fullmatch(r"pci[0-9a-f]{4,}:[0-9a-f]{2}", part)), None)
    return () if start is None else parts[start:]


def _speed(text: str) -> float | None:
    """Return 32.0 for `32.0 GT/s PCIe`, None for `Unknown`; raises ValueError."""
    if text.startswith("Unknown"):
        return None
    number, unit = text.split()[:2]
    if unit != "GT/s":
        raise ValueError("not a speed in GT/s")
    return float(number)


def _redirects(reader: FactReader, folder: Path, path: tuple[str, ...]) -> Seen[bool] | None:
    """Return whether a switch port above the device sends traffic between devices up to the host.

    Root ports do not count, because traffic between two of them passes the host anyway.
    """
    answer: Seen[bool] | None = None
    for bridge in path[2:-1]:
        place = folder / bridge / "config"
        try:
            with place.open("rb") as stream:
                config = stream.read(CONFIG_BYTES)
        except FileNotFoundError:
            continue
        except OSError as error:
            reader.note(f"{place}: {error.strerror or error}")
            continue
        if len(config) <= _EXTENDED:
            reader.limit("PCIe access control (ACS) of switches: only root may read it")
            continue
        control = _acs_control(config)
        if control is not None and (answer is None or not answer.value):
            answer = Seen(bool(control & _REDIRECTS), f"{place} (ACSCtl 0x{control:04x})")
    return answer


def _acs_control(config: bytes) -> int | None:
    """Return the ACS control register, None if the port has none."""
    at = _EXTENDED
    for _ in range(_CAPABILITIES_MAX):
        header = int.from_bytes(config[at : at + 4], "little")
        if header in (0, 0xFFFFFFFF):
            return None
        if header & 0xFFFF == _ACS:
            register = config[at + 6 : at + 8]
            return int.from_bytes(register, "little") if len(register) == 2 else None
        at = header >> 20
        if at < _EXTENDED or at % 4:
            return None
    return None
