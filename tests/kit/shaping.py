"""How do ranks on one machine get a link of 1 Gbit/s and 5 ms between them?  A namespace each, and a shaped wire.

Two kinds of wire, because not every kernel has netem.  Without delay: veth pairs on a bridge, shaped by the kernel's
tbf on each sender's side.  With delay: a TUN device in each namespace, whose packets a process of ours (the hub) lets
go at the rate of the sender's link and hands on after the delay.  Congestion control is cubic or reno: bbr, the default
on some machines, reads a token bucket as a slower link than it is.

Needs root.  `why_not` says what is missing.  All names are made up anew, and everything is removed at the end; the
machine's own network is never touched.
"""

from __future__ import annotations

import argparse
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["UNLIMITED", "Link", "Net", "change_wire", "delayed_wire", "sh", "shaped", "why_not"]

DEVICE = "eth0"
NETWORK = "10.77.0"

MTU_BYTES = 32_000
"""On the delayed wire: a packet a quarter of a millisecond at 1 Gbit/s, so that python can carry them."""

QUEUE_SECONDS = 0.05
"""What a delayed link queues before it drops, as tbf's `latency`."""

BURST_BYTES = 256 * 1024
"""tbf's bucket: 2 ms at 1 Gbit/s, and at least what a sender hands over at once (a GSO packet of 64 KiB)."""

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
"""linux/if_tun.h"""


@dataclass(frozen=True, slots=True)
class Link:
    """Every rank's link: megabits a second (None: as fast as the machine can) and milliseconds one way.

    After a pause the first `burst_bytes` go at full speed, where there is no delay.  With a delay, `loss_ratio` of the
    packets are lost: 1.0 is a link that is down, which neither end can see.
    """

    megabits: int | None
    delay_ms: float = 0.0
    burst_bytes: int = BURST_BYTES
    loss_ratio: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Link:
        """Read "1000", "1000/5" (5 ms one way) or "unlimited"."""
        rate, _, delay = text.partition("/")
        return cls(None if rate == "unlimited" else int(rate), float(delay or 0))

    def __str__(self) -> str:
        rate = "unlimited" if self.megabits is None else f"{self.megabits / 1000:g} Gbit/s"
        return rate if not self.delay_ms else f"{rate}, {self.delay_ms:g} ms"


UNLIMITED = Link(None)


def why_not() -> str | None:
    """Return why links cannot be shaped here, or None."""
    if os.geteuid() != 0:
        return "shaped links need root (network namespaces)"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"shaped links need {' and '.join(missing)} (iproute2)"
    try:
        with shaped(2, Link(1000)):
            return None
    except RuntimeError as error:
        return str(error)


class Net:
    """`prefixes[rank]` is what to put before a rank's command; the ranks' device is DEVICE, rank 0 is at `address`."""

    def __init__(self, prefixes: list[list[str]], hub: subprocess.Popen[str] | None) -> None:
        self.prefixes = prefixes
        self.address = f"{NETWORK}.1"
        self.device = DEVICE
        self._hub = hub

    def change(self, link: Link, only: int | None = None) -> None:
        """Give every rank, or `only` one, another link; a wire without delay stays one without, and vice versa."""
        if self._hub is None:
            if link.delay_ms:
                raise ValueError("this wire was made without delay")
            for prefix in self.prefixes if only is None else [self.prefixes[only]]:
                _shape(prefix, link)
            return
        if only is not None:
            raise ValueError("a wire with delay is one for all ranks")
        change_wire(self._hub, link)

    def sent_bytes(self) -> list[int]:
        """Return what each rank's device has sent so far: do the bytes really cross it?"""
        return [
            int(sh(f"{' '.join(prefix)} cat /sys/class/net/{DEVICE}/statistics/tx_bytes")) for prefix in self.prefixes
        ]


@contextmanager
def shaped(ranks: int, link: Link) -> Iterator[Net]:
    """Make `ranks` namespaces with `link` between them, and remove them again.

    Raises:
        RuntimeError: it cannot be done here; says what failed.
    """
    stem = f"pc{uuid.uuid4().hex[:6]}"
    names = [f"{stem}{rank}" for rank in range(ranks)]
    hub: subprocess.Popen[str] | None = None
    made: list[str] = []
    try:
        for name in (f"{stem}b", *names):
            sh(f"ip netns add {name}")
            made.append(name)
            sh(f"ip -n {name} link set lo up")
        prefixes = [["ip", "netns", "exec", name] for name in names]
        if link.delay_ms:
            hub = delayed_wire(f"{stem}b", names, link)
        else:
            _bridged_wire(stem, names)
        for rank, (name, prefix) in enumerate(zip(names, prefixes, strict=True)):
            sh(f"ip -n {name} addr add {NETWORK}.{rank + 1}/24 dev {DEVICE}")
            sh(f"ip -n {name} link set {DEVICE} up")
            _avoid_bbr(prefix)
            if hub is None:
                _shape(prefix, link)
        yield Net(prefixes, hub)
    finally:
        if hub is not None:
            hub.communicate()  # the end of its standard input is its own
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False)


def _bridged_wire(stem: str, names: list[str]) -> None:
    sh(f"ip -n {stem}b link add br0 type bridge")
    sh(f"ip -n {stem}b link set br0 up")
    for rank, name in enumerate(names):
        sh(f"ip -n {name} link add {DEVICE} type veth peer name p{rank} netns {stem}b")
        sh(f"ip -n {stem}b link set p{rank} master br0 up")


def delayed_wire(middle: str, names: list[str], link: Link, device: str = DEVICE) -> subprocess.Popen[str]:
    """Give each namespace in `names` a `device`; return the hub, in the namespace `middle`, that carries the packets.

    The end of its standard input ends it.
    """
    command = ["ip", "netns", "exec", middle, sys.executable, os.path.abspath(__file__), str(len(names))]
    hub = subprocess.Popen(
        [*command, str(link.megabits or 0), str(link.delay_ms), str(link.loss_ratio)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    if hub.stdout.readline().strip() != "ready":
        hub.wait()
        raise RuntimeError("TUN devices cannot be made here: links with delay need /dev/net/tun")
    for rank, name in enumerate(names):
        sh(f"ip -n {middle} link set t{rank} netns {name}")
        sh(f"ip -n {name} link set t{rank} name {device} mtu {MTU_BYTES}")
    return hub


def change_wire(hub: subprocess.Popen[str], link: Link) -> None:
    """Let the hub of a delayed wire carry packets as `link` would."""
    hub.stdin.write(f"{link.megabits or 0} {link.delay_ms} {link.loss_ratio}\n")
    hub.stdin.flush()


def _shape(prefix: list[str], link: Link) -> None:
    tc = f"{' '.join(prefix)} tc qdisc"
    if link.megabits is None:
        subprocess.run(f"{tc} del dev {DEVICE} root".split(), check=False, capture_output=True)
        return
    rate = f"rate {link.megabits}mbit burst {link.burst_bytes} latency {QUEUE_SECONDS * 1e3:.0f}ms"
    sh(f"{tc} replace dev {DEVICE} root tbf {rate}")


def _avoid_bbr(prefix: list[str]) -> None:
    """Take cubic, else reno: a namespace may only use what the machine allows everybody."""
    for name in ("cubic", "reno"):
        write = [*prefix, "sh", "-c", f"echo {name} > /proc/sys/net/ipv4/tcp_congestion_control"]
        if subprocess.run(write, check=False, capture_output=True).returncode == 0:
            return


def sh(command: str) -> str:
    """Return what `command` prints; raises RuntimeError with what it said where it fails."""
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"shaped links cannot be made here: {command}: {done.stderr.strip()}")
    return done.stdout


# --- the hub, a process of its own in the bridge's namespace ----------------------------------------------------


def _open_tun(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return descriptor


class _Hub:
    """Carries IPv4 packets between the ranks' devices, each sender at its rate, all after the delay."""

    def __init__(self, devices: list[int], megabits: int, delay_ms: float, loss_ratio: float) -> None:
        self._devices = devices
        self._free = [0.0] * len(devices)
        self._due: list[tuple[float, int, int, bytes]] = []
        self._count = 0
        self._dice = random.Random(1)
        self.set(megabits, delay_ms, loss_ratio)

    def set(self, megabits: int, delay_ms: float, loss_ratio: float) -> None:
        """Take another link; what is on its way arrives as it was to."""
        self._loss_ratio = loss_ratio
        self._seconds_per_byte = 8e-6 / megabits if megabits else 0.0
        self._delay = delay_ms / 1e3

    def run(self) -> None:
        """Carry until standard input ends."""
        while True:
            wait = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            readable, _, _ = select.select([0, *self._devices], [], [], wait)
            if 0 in readable:
                line = sys.stdin.readline()
                if not line:
                    return
                megabits, delay_ms, loss_ratio = line.split()
                self.set(int(megabits), float(delay_ms), float(loss_ratio))
            for sender, device in enumerate(self._devices):
                if device in readable:
                    self._take(sender, device)
            self._deliver()

    def _take(self, sender: int, device: int) -> None:
        try:
            packet = os.read(device, 65_535)
        except BlockingIOError:
            return
        if packet[0] >> 4 != 4 or self._dice.random() < self._loss_ratio:
            return
        receiver = packet[19] - 1
        now = time.monotonic()
        queued = self._free[sender] - now
        if queued > QUEUE_SECONDS or not 0 <= receiver < len(self._devices):
            return
        self._free[sender] = now + max(0.0, queued) + len(packet) * self._seconds_per_byte
        self._count += 1
        heapq.heappush(self._due, (self._free[sender] + self._delay, self._count, receiver, packet))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            _, _, receiver, packet = heapq.heappop(self._due)
            try:
                os.write(self._devices[receiver], packet)
            except OSError:
                return  # the device is going down, or its queue is full: a wire loses packets too


def _main() -> None:
    parser = argparse.ArgumentParser(description="The hub of a delayed wire.")
    parser.add_argument("ranks", type=int)
    parser.add_argument("megabits", type=int)
    parser.add_argument("delay_ms", type=float)
    parser.add_argument("loss_ratio", type=float)
    args = parser.parse_args()
    devices = [_open_tun(f"t{rank}") for rank in range(args.ranks)]
    hub = _Hub(devices, args.megabits, args.delay_ms, args.loss_ratio)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    hub.run()


if __name__ == "__main__":
    _main()
