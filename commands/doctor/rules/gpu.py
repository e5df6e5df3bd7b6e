"""Rules for GPUs: driver, power, clocks, links and memory, from NVML.

`pacecar.gpu_health` judges whether a board is broken, as on the page and in alerts; rules here add the commands for its
reasons.

Speeds are judged only while the board is working, because an idle board lowers its clocks and the generation of its
PCIe link (but not the width).  Data-centre boards also idle in P0, so the clock reasons decide, not the state.
"""

from __future__ import annotations

from collections.abc import Callable

from pacecar.formatting.dates import second_text
from pacecar.formatting.quantities import gibibytes
from pacecar.gpu_health import GpuReadings, HealthReason, judge
from pacecar.monitor.gpu.queries.derived import CLOCK_REASONS

from ..facts.evidence import FindingEvidence
from ..facts.model import NVIDIA, GpuFacts, NodeFacts
from ..findings import Hit, Rule, Severity, hit
from ..sources import DRIVER_README, MEMORY_ERRORS, MIG, NVML, PERSISTENCE

__all__ = ["RULES"]

_SLOWDOWNS = {bit: name for bit, name in CLOCK_REASONS.items() if name.endswith("slowdown") or name == "hw_power_brake"}
_APPLICATION_CLOCKS = next(bit for bit, name in CLOCK_REASONS.items() if name == "applications_clocks_setting")
_IDLE = next(bit for bit, name in CLOCK_REASONS.items() if name == "gpu_idle")
_FASTEST_STATE = 0
_PEER_STATUS = {
    1: "the chipset does not support it",
    2: "the GPU does not support it",
    3: "the I/O hubs' topology does not support it",
    4: "disabled by a registry key of the driver",
    5: "not supported",
    6: "unknown",
}  # NVML_P2P_STATUS_*
_PEER_FAULT = 4
"""The only status that can be changed; the others are properties of the hardware (GeForce boards report 1 and 5)."""


def _source(gpu: GpuFacts) -> str:
    """Return the source of the GPU's values."""
    return f"NVML, GPU {gpu.index}{f' ({gpu.address})' if gpu.address else ''}"


def _of_each(
    facts: NodeFacts, what: str, describe: Callable[[GpuFacts], str | None], remedy: Callable[[list[int]], str]
) -> Hit | None:
    """Return a hit with all GPUs for which `describe` returns text; `remedy` gets their indices."""
    found = [(gpu, text) for gpu in facts.gpus.working if (text := describe(gpu)) is not None]
    if not found:
        return None
    evidence = tuple(FindingEvidence(what, text, _source(gpu)) for gpu, text in found)
    return Hit(evidence, remedy([gpu.index for gpu, _ in found]))


def _found(facts: NodeFacts, *reasons: HealthReason) -> dict[int, str]:
    """Return index -> figure of each GPU that has one of `reasons`."""
    boards = facts.gpus.boards
    verdicts = judge([_readings(gpu, facts.gpus.uptime_ns) for gpu in boards])
    return {
        gpu.index: finding.figure
        for gpu, health in zip(boards, verdicts, strict=True)
        for finding in health.findings
        if finding.reason in reasons
    }


def _readings(gpu: GpuFacts, uptime_ns: int | None) -> GpuReadings:
    return GpuReadings(
        name=gpu.name,
        is_up=gpu.lost is None,
        down_reason=gpu.lost,
        row_remap_failed=_flag(gpu.remap_failed),
        row_remap_pending=_flag(gpu.remap_pending),
        retired_pages_pending=_flag(gpu.retire_pending),
        sram_threshold_exceeded=gpu.sram_over_threshold,
        uncorrected_errors=gpu.uncorrected_errors,
        pcie_width=gpu.pcie_width,
        pcie_width_max=gpu.pcie_width_max,
        chip_links=gpu.chip_links,
        has_mig=gpu.has_mig,
        links_up=frozenset(gpu.links_up),
        links_down=frozenset(gpu.links_down),
        has_switch=gpu.has_switch,
        fabric_state=gpu.fabric_state,
        fabric_status=gpu.fabric_status,
        fabric_waits_ns=uptime_ns,  # an upper bound, as this is the first reading
        fabric_conditions=dict(gpu.fabric_conditions),
        fabric_health=gpu.fabric_health,
        fabric_problem=gpu.fabric_problem,
    )


def _flag(value: int | None) -> bool | None:
    return None if value is None else value != 0


def _broken(*reasons: HealthReason, what: str, remedy: Callable[[list[int]], str]) -> Callable[[NodeFacts], Hit | None]:
    """Return a check for GPUs with one of `reasons`; `remedy` gets their indices."""

    def check(facts: NodeFacts) -> Hit | None:
        found = _found(facts, *reasons)
        return _of_each(facts, what, lambda gpu: found.get(gpu.index), remedy)

    return check


def _numbers(indices: list[int]) -> str:
    return ",".join(map(str, indices))


def _driver_missing(facts: NodeFacts) -> Hit | None:
    if facts.gpus.absent is None or facts.gpus.absent == "not asked":
        return None
    # Cards bound to vfio-pci belong to a virtual machine.
    cards = [
        device for device in facts.pci if device.vendor == NVIDIA and device.is_gpu and device.driver != "vfio-pci"
    ]
    evidence = [FindingEvidence("NVIDIA GPU on the bus", device.address, device.where) for device in cards]
    if not evidence:
        return None
    return Hit(
        (*evidence, FindingEvidence("driver", facts.gpus.absent, "NVML")),
        "sudo modprobe nvidia && nvidia-smi    # in a container: start it with its GPUs (docker run --gpus all)",
    )


def _lost(facts: NodeFacts) -> Hit | None:
    if facts.gpus.absent is not None:
        return None
    evidence = [
        FindingEvidence("GPU does not answer", words, f"NVML, GPU {index}")
        for index, words in _found(facts, HealthReason.DOWN).items()
    ]
    return hit(evidence, "sudo dmesg | grep -i xid    # then drain the node and restart it")


def _missing(facts: NodeFacts) -> Hit | None:
    """Find GPUs that the daemon has seen here and that the driver does not list."""
    gpus = facts.gpus
    if gpus.absent == "not asked" or any(gpu.lost is not None for gpu in gpus.boards):
        return None  # a board that does not answer cannot be identified
    here = {gpu.uuid for gpu in gpus.boards}
    on_bus = {device.address for device in facts.pci if device.vendor == NVIDIA and device.is_gpu}
    evidence = []
    for seen in gpus.known:
        known, address = seen.value, seen.value.pci_bus_id
        if known.uuid in here or (gpus.absent is not None and address in on_bus):
            continue  # cards without a driver have their own rule
        place = "still on the PCI bus" if address in on_bus else "not on the PCI bus"
        words = f"{known.name}, {known.uuid}, at {address}: {place}, last seen {second_text(known.seen_wall_ns)}"
        evidence.append(FindingEvidence(f"GPU {known.gpu}", words, seen.where))
    where = gpus.known[0].where if gpus.known else ""
    return hit(
        evidence,
        f"sudo dmesg | grep -i -e xid -e pcieport    # cold-restart the node; if removed on purpose: sudo rm {where}",
    )


def _persistence(facts: NodeFacts) -> Hit | None:
    return _of_each(
        facts,
        "persistence mode",
        lambda gpu: "off" if gpu.is_persistent is False else None,
        lambda _: "sudo systemctl enable --now nvidia-persistenced    # or until the next boot: sudo nvidia-smi -pm 1",
    )


def _power_cap(facts: NodeFacts) -> Hit | None:
    def describe(gpu: GpuFacts) -> str | None:
        limit, default = gpu.power_limit, gpu.power_limit_default
        # In whole watts, as they are set: a board may report 700.1 W for a default of 700.2.
        if limit is None or default is None or round(limit / 1000) >= round(default / 1000):
            return None
        return f"{limit / 1000:.0f} W, the board's default is {default / 1000:.0f} W"

    def remedy(indices: list[int]) -> str:
        default = next(gpu.power_limit_default for gpu in facts.gpus.working if gpu.index == indices[0])
        assert default is not None, "a board without a default has no evidence"
        return f"sudo nvidia-smi -i {_numbers(indices)} -pl {default // 1000}"

    return _of_each(facts, "power limit", describe, remedy)


def _throttled(facts: NodeFacts) -> Hit | None:
    def describe(gpu: GpuFacts) -> str | None:
        reasons = [name for bit, name in _SLOWDOWNS.items() if (gpu.clock_reasons or 0) & bit]
        if not reasons:
            return None
        clock = (
            ""
            if gpu.clock_sm is None or gpu.clock_sm_max is None
            else f", SM clock {gpu.clock_sm} of {gpu.clock_sm_max} MHz"
        )
        return f"{', '.join(reasons)}{clock}"

    return _of_each(
        facts,
        "clocks held down by",
        describe,
        lambda indices: f"nvidia-smi -i {_numbers(indices)} -q -d PERFORMANCE,TEMPERATURE,POWER",
    )


def _locked_clocks(facts: NodeFacts) -> Hit | None:
    def describe(gpu: GpuFacts) -> str | None:
        if not (gpu.clock_reasons or 0) & _APPLICATION_CLOCKS or gpu.clock_sm is None or gpu.clock_sm_max is None:
            return None
        return f"{gpu.clock_sm} of {gpu.clock_sm_max} MHz" if gpu.clock_sm < gpu.clock_sm_max else None

    return _of_each(
        facts,
        "SM clock, by a setting",
        describe,
        lambda indices: f"sudo nvidia-smi -i {_numbers(indices)} -rgc; sudo nvidia-smi -i {_numbers(indices)} -rac",
    )


def _pcie(facts: NodeFacts) -> Hit | None:
    narrow = _found(facts, HealthReason.PCIE_WIDTH)

    def describe(gpu: GpuFacts) -> str | None:
        if gpu.chip_links:
            return None  # Grace: NVLink-C2C connects the processor, and PCIe carries almost nothing
        parts = [narrow[gpu.index]] if gpu.index in narrow else []
        if (
            gpu.performance_state == _FASTEST_STATE
            and gpu.clock_reasons is not None
            and not gpu.clock_reasons & _IDLE
            and None not in (gpu.pcie_generation, gpu.pcie_generation_max)
            and gpu.pcie_generation < gpu.pcie_generation_max  # type: ignore[operator]  # neither is None
        ):
            parts.append(f"generation {gpu.pcie_generation} of {gpu.pcie_generation_max} at work (P0)")
        return ", ".join(parts) or None

    def remedy(indices: list[int]) -> str:
        first = next(gpu for gpu in facts.gpus.working if gpu.index == indices[0])
        return f"sudo lspci -vv -s {first.address} | grep Lnk    # then reseat the card or riser"

    return _of_each(facts, "PCIe link", describe, remedy)


def _reset(indices: list[int]) -> str:
    return f"sudo nvidia-smi --gpu-reset -i {_numbers(indices)}    # while no process uses it"


def _inspect_fabric(indices: list[int]) -> str:
    return f"nvidia-smi -i {_numbers(indices)} -q | grep -A12 Fabric && sudo journalctl -u nvidia-fabricmanager"


def _peers(facts: NodeFacts) -> Hit | None:
    boards = {gpu.index: gpu for gpu in facts.gpus.working}
    evidence = []
    for (reader, owner), status in sorted(facts.gpus.peers.items()):
        if reader > owner or status == 0 or status not in _PEER_STATUS:
            continue
        both = [boards.get(reader), boards.get(owner)]
        has_links = all(gpu is not None and gpu.links_up and gpu.has_switch and not gpu.has_mig for gpu in both)
        if status == _PEER_FAULT or has_links:
            evidence.append(
                FindingEvidence(
                    f"P2P between GPU {reader} and {owner}", _PEER_STATUS[status], "NVML, nvmlDeviceGetP2PStatus"
                )
            )
    return hit(evidence, "nvidia-smi topo -p2p r && cat /proc/driver/nvidia/params | grep -i -e RegistryDwords -e P2P")


def _mig(facts: NodeFacts) -> Hit | None:
    return _of_each(
        facts,
        "MIG mode",
        lambda gpu: "on" if gpu.has_mig and len(facts.gpus.working) > 1 else None,
        lambda indices: f"sudo nvidia-smi -i {_numbers(indices)} -mig 0",
    )


def _mixed(facts: NodeFacts) -> Hit | None:
    names: dict[tuple[str, int | None], list[GpuFacts]] = {}
    for gpu in facts.gpus.working:
        names.setdefault((gpu.name, gpu.memory_bytes), []).append(gpu)
    if len(names) < 2 or facts.settings.get("CUDA_VISIBLE_DEVICES") is not None:
        return None  # the GPUs were chosen
    evidence = [
        FindingEvidence(
            f"GPU {_numbers([gpu.index for gpu in gpus])}",
            name if memory is None else f"{name}, {gibibytes(memory)}",
            _source(gpus[0]),
        )
        for (name, memory), gpus in names.items()
    ]
    largest = max(names.values(), key=len)
    return hit(
        evidence,
        # CUDA's default order is fastest first, NVML's is bus order.
        f"export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={_numbers([gpu.index for gpu in largest])}"
        "    # one kind in one job",
    )


RULES = (
    Rule("gpu-driver-missing", Severity.CRITICAL, "GPUs without a driver",
         "the cards are on the bus, but the driver does not answer: they cannot be used", "machine",
         DRIVER_README.at("Installing the NVIDIA Driver"), _driver_missing),
    Rule("gpu-lost", Severity.CRITICAL, "A GPU does not answer",
         "a collective waits for all ranks, so one lost GPU stops the job", "machine",
         NVML.at("nvmlReturn_t, NVML_ERROR_GPU_IS_LOST"), _lost),
    Rule("gpu-missing", Severity.CRITICAL, "A GPU that was here is gone",
         "the daemon has seen it on this node, but the driver does not list it: jobs that need all GPUs do not start",
         "machine", NVML.at("nvmlDeviceGetCount"), _missing),
    Rule("gpu-persistence-off", Severity.INFO, "Persistence mode is off",
         "the driver releases a GPU with its last process; starting it again takes seconds and resets settings",
         "machine", PERSISTENCE.at("Data Persistence; Persistence Daemon"), _persistence),
    Rule("gpu-power-cap", Severity.WARNING, "A power limit is below the board's default",
         "under load the clocks fall until the board stays within the limit; the slowest rank sets the pace of all",
         "machine", NVML.at("nvmlDeviceGetPowerManagementDefaultLimit"), _power_cap),
    Rule("gpu-throttled", Severity.WARNING, "Heat or the power supply holds the clocks down",
         "the board protects itself and runs below its rated clocks", "machine",
         NVML.at("nvmlClocksEventReasons"), _throttled),
    Rule("gpu-clocks-locked", Severity.INFO, "A setting holds the clocks down",
         "application clocks are set below the maximum", "machine",
         NVML.at("nvmlClocksEventReasons, ApplicationsClocksSetting"), _locked_clocks),
    Rule("gpu-pcie-link", Severity.WARNING, "A GPU's PCIe link is below its maximum",
         "copies from the host and all traffic outside NVLink share this link", "machine",
         NVML.at("nvmlDeviceGetCurrPcieLinkWidth, nvmlDeviceGetMaxPcieLinkWidth"), _pcie),
    Rule("gpu-memory-pending", Severity.WARNING, "Faulty memory waits for a reset",
         "the driver can replace bad memory only when the GPU is reset; until then errors may end the job",
         "machine", MEMORY_ERRORS.at("Row Remapping; Dynamic Page Offlining"),
         _broken(HealthReason.MEMORY_REPAIR_PENDING, what="memory", remedy=_reset)),
    Rule("gpu-memory-failed", Severity.CRITICAL, "Faulty memory cannot be repaired",
         "the next uncorrectable error there ends the job", "machine",
         MEMORY_ERRORS.at("RMA Policy Thresholds for Row-Remapping"),
         _broken(HealthReason.ROW_REMAP_FAILED, HealthReason.SRAM_ECC_THRESHOLD, what="memory", remedy=lambda indices:
             f"nvidia-smi -i {_numbers(indices)} -q -d ROW_REMAPPER,ECC"
             "    # take the node out and have the board replaced")),
    Rule("gpu-memory-errors", Severity.CRITICAL, "Memory errors could not be corrected",
         "the driver kills a process that hits one, and results since then cannot be trusted", "machine",
         MEMORY_ERRORS.at("Error Containment; Dynamic Page Offlining"),
         _broken(HealthReason.ECC_UNCORRECTED, what="uncorrected ECC errors", remedy=_reset)),
    Rule("gpu-nvlink-down", Severity.CRITICAL, "NVLinks are down",
         "collectives run at the speed of the weakest GPU's links, or over PCIe instead of NVLink", "machine",
         NVML.at("nvmlDeviceGetNvLinkState"),
         _broken(HealthReason.NVLINK_DOWN, what="NVLink", remedy=lambda indices:
             f"nvidia-smi nvlink -s -i {indices[0]} && sudo dmesg | grep -i nvlink")),
    Rule("gpu-fabric-unready", Severity.CRITICAL, "GPUs are not registered with the NVSwitch fabric",
         "CUDA cannot start (error 802), or runs without NVLink", "machine",
         NVML.at("Fabric definitions, nvmlGpuFabricState_t"),
         _broken(HealthReason.FABRIC_NOT_JOINED, HealthReason.FABRIC_FAILED, what="NVLink fabric registration",
             remedy=lambda _: "sudo systemctl restart nvidia-fabricmanager && nvidia-smi -q | grep -A4 Fabric"
             "    # ends running jobs")),
    Rule("gpu-fabric-misconfigured", Severity.CRITICAL, "The NVSwitch fabric is misconfigured",
         "GPUs in different partitions cannot reach each other over NVLink", "machine",
         NVML.at("Fabric definitions, NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION"),
         _broken(HealthReason.FABRIC_MISCONFIGURED, what="NVLink fabric", remedy=_inspect_fabric)),
    Rule("gpu-fabric-degraded", Severity.WARNING, "The NVSwitch fabric is degraded",
         "collectives run at the speed of the slowest route", "machine",
         NVML.at("Fabric definitions, NVML_GPU_FABRIC_HEALTH_MASK_*"),
         _broken(HealthReason.FABRIC_DEGRADED, what="NVLink fabric", remedy=_inspect_fabric)),
    Rule("gpu-p2p-off", Severity.WARNING, "P2P between GPUs is disabled",
         "without P2P, each transfer between two GPUs is copied through the host's memory", "machine",
         NVML.at("nvmlDeviceGetP2PStatus"), _peers),
    Rule("gpu-mig-on", Severity.INFO, "GPUs are partitioned into MIG instances",
         "instances have neither NVLink nor P2P, so a job on several GPUs communicates through the host",
         "machine", MIG.at("Application Considerations"), _mig),
    Rule("gpu-mixed", Severity.INFO, "GPUs of several kinds in one node",
         "ranks with equal shares of the work wait for the slowest kind", "machine",
         NVML.at("nvmlDeviceGetName"), _mixed),
)  # fmt: skip
