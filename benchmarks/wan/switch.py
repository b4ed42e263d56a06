"""Hosts as network namespaces, joined by a user-space switch that gives each host a link with a bandwidth and a delay.

Needs root. The switch reads frames from one end of each host's veth pair, delays them as the link would, and sends them to the
target's. Bandwidth and delay can change at any time, and every byte is counted. Frames that do not fit into a link's queue are
dropped, as by a router.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

MTU = 9000
QUEUE_S = 0.2
LEAST_QUEUE_BYTES = 20 * MTU
NET = "10.77.0"
ALL_PROTOCOLS = 3
PACKET_OUTGOING = 4
SIOCETHTOOL, ETHTOOL_STXCSUM = 0x8946, 0x17


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@dataclass
class Port:
    host: str
    number: int
    sock: socket.socket
    mbit: float = 0.0
    delay_s: float = 0.0
    free_at: dict[str, float] = field(default_factory=lambda: {"up": 0.0, "down": 0.0})
    bytes: dict[str, int] = field(default_factory=lambda: {"up": 0, "down": 0})
    dropped: int = 0

    @property
    def mac(self) -> bytes:
        return bytes([2, 0x77, 0, 0, 0, self.number])

    def passes(self, way: str, size: int, now: float) -> float | None:
        """When a frame that arrives now has passed this link, or None if the queue is full."""
        if not self.mbit:
            return now
        rate = self.mbit * 1e6 / 8
        waiting = max(self.free_at[way] - now, 0.0)
        if waiting * rate > max(QUEUE_S * rate, LEAST_QUEUE_BYTES):
            return None
        self.free_at[way] = max(self.free_at[way], now) + size / rate
        return self.free_at[way]


class Switch:
    """A star: frames go up the link of their sender and down the link of their receiver."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._tag = f"{os.getpid() % 10_000}"
        self.ports = {host: self._plug_in(host, number) for number, host in enumerate(hosts, 1)}
        self._by_mac = {port.mac: port for port in self.ports.values()}
        self._stopping = False
        self._thread = threading.Thread(target=self._forward, name="switch", daemon=True)
        self._thread.start()

    def space(self, host: str) -> str:
        return f"skerry-{self._tag}-{host}"

    def address(self, host: str) -> str:
        return f"{NET}.{self.ports[host].number}"

    def command(self, host: str, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.space(host), *words]

    def set(self, host: str, mbit: float, delay_s: float) -> None:
        self.ports[host].mbit, self.ports[host].delay_s = mbit, delay_s

    def _plug_in(self, host: str, number: int) -> Port:
        space, outer = self.space(host), f"sk{self._tag}p{number}"
        inside = ("ip", "-n", space)
        run("ip", "netns", "add", space)
        run(
            "ip", "link", "add", outer, "mtu", str(MTU), "type", "veth", "peer", "name", "net0", "mtu", str(MTU), "netns", space
        )
        run("ip", "link", "set", outer, "up")
        mac = ":".join(f"{byte:02x}" for byte in bytes([2, 0x77, 0, 0, 0, number]))
        run(*inside, "link", "set", "net0", "address", mac)
        run(*inside, "addr", "add", f"{NET}.{number}/24", "dev", "net0")
        run(*inside, "link", "set", "lo", "up")
        run(*inside, "link", "set", "net0", "up")
        # There is no hardware to fill in offloaded checksums, so they would be wrong on arrival.
        run("ip", "netns", "exec", space, sys.executable, __file__, "net0")
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
        sock.bind((outer, 0))
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        return Port(host, number, sock)

    def _forward(self) -> None:
        ready = selectors.DefaultSelector()
        for port in self.ports.values():
            ready.register(port.sock, selectors.EVENT_READ, port)
        in_flight: list[tuple[float, int, Port, bytes]] = []
        order = 0
        while not self._stopping:
            now = time.monotonic()
            while in_flight and in_flight[0][0] <= now:
                _, _, port, frame = heapq.heappop(in_flight)
                with contextlib.suppress(OSError):
                    port.sock.send(frame)
            wait = min(0.05, max(0.0, in_flight[0][0] - now)) if in_flight else 0.05
            for key, _ in ready.select(wait):
                with contextlib.suppress(BlockingIOError):
                    while True:
                        frame, about = key.data.sock.recvfrom(65_536)
                        if about[2] == PACKET_OUTGOING:
                            continue
                        for target in self._targets(key.data, frame):
                            arrives = self._through(key.data, target, len(frame))
                            if arrives is not None:
                                order += 1
                                heapq.heappush(in_flight, (arrives, order, target, frame))

    def _targets(self, source: Port, frame: bytes) -> list[Port]:
        known = self._by_mac.get(frame[:6])
        if known is not None:
            return [known]
        # Broadcasts carry ARP. Other unknown destinations are dropped.
        return [port for port in self.ports.values() if port is not source] if frame[:6] == b"\xff" * 6 else []

    def _through(self, source: Port, target: Port, size: int) -> float | None:
        source.bytes["up"] += size
        sent = source.passes("up", size, time.monotonic())
        arrives = target.passes("down", size, sent) if sent is not None else None
        if arrives is None:
            source.dropped += 1
            return None
        target.bytes["down"] += size
        return arrives + source.delay_s + target.delay_s

    def close(self) -> None:
        self._stopping = True
        self._thread.join()
        for port in self.ports.values():
            port.sock.close()
            subprocess.run(["ip", "netns", "del", self.space(port.host)], check=False)


@contextlib.contextmanager
def switched(hosts: Sequence[str]) -> Iterator[Switch]:
    switch = Switch(hosts)
    try:
        yield switch
    finally:
        switch.close()


def _checksums_in_software(interface: str) -> None:
    import ctypes

    value = ctypes.create_string_buffer(struct.pack("II", ETHTOOL_STXCSUM, 0))
    request = struct.pack("16sP", interface.encode(), ctypes.addressof(value)) + bytes(16)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, SIOCETHTOOL, request)


if __name__ == "__main__":
    _checksums_in_software(sys.argv[1])
