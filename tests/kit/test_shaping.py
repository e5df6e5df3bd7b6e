"""The wires that other tests and benches are run on are what they claim to be: rate, delay, and change."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kit.shaping import Link, Net, shaped, why_not

SERVER = """
import socket, time
listener = socket.create_server(("10.77.0.1", 5000)); print("up", flush=True)
peer, _ = listener.accept()
for _ in range(20): peer.sendall(peer.recv(1))
received, begun = 0, time.monotonic()
while chunk := peer.recv(1 << 20): received += len(chunk)
print(received * 8e-6 / (time.monotonic() - begun))
"""
CLIENT = """
import socket, sys, time
peer = socket.create_connection(("10.77.0.1", 5000)); peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
trips = []
for _ in range(20):
    begun = time.monotonic(); peer.sendall(b"x"); peer.recv(1); trips.append(time.monotonic() - begun)
print(sorted(trips)[10] * 1e3)
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end: peer.sendall(bytes(1 << 18))
"""


def measure(net: Net, seconds: float) -> tuple[float, float]:
    """Return megabits a second and milliseconds of a round trip."""
    server = subprocess.Popen([*net.prefixes[0], sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        server.stdout.readline()
        client = [*net.prefixes[1], sys.executable, "-c", CLIENT, str(seconds)]
        trip = subprocess.run(client, capture_output=True, text=True, check=True, timeout=60).stdout
        return float(server.communicate(timeout=60)[0]), float(trip)
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


@pytest.fixture(scope="module", autouse=True)
def _possible() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.slow
def test_a_link_has_its_rate_and_can_be_given_another() -> None:
    with shaped(2, Link.parse("200")) as net:
        rate, trip = measure(net, 0.6)
        assert 120 <= rate <= 215
        assert trip < 5
        net.change(Link.parse("1000"))
        assert measure(net, 0.6)[0] > 1.5 * rate
        net.change(Link.parse("200"), only=1)  # which is the one that sends
        assert measure(net, 0.6)[0] <= 215


@pytest.mark.slow
def test_a_delayed_link_delays_each_way() -> None:
    with shaped(2, Link.parse("200/5")) as net:
        rate, trip = measure(net, 1.0)
        assert 10 <= trip <= 40  # a busy machine adds to it
        assert rate <= 220
        net.change(Link.parse("200/1"))
        assert 2 <= measure(net, 0.2)[1] <= 8


def test_what_is_no_link_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="fast"):
        Link.parse("fast")
