"""Links that can be made bad: bytes are unchanged when nothing is wrong, and each fault does what it says."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skerry.chaos.bucket import BURST_S, TokenBucket
from skerry.chaos.proxy import BUFFER_BYTES, Condition, LinkProxy, LinkState


class Echo:
    """A server that answers what it is told, while `reading` is set."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.reading = threading.Event()
        self.reading.set()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with connection:
            try:
                while self.reading.wait() and (data := connection.recv(65536)):
                    connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
            except OSError:
                pass


@pytest.fixture(scope="module")
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.listener.close()


@pytest.fixture(scope="module")
def proxy(echo: Echo) -> Iterator[LinkProxy]:
    made = LinkProxy(["island-0", "island-1"], echo.address, seed=7)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def healthy(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "proxy" in request.fixturenames:
        request.getfixturevalue("proxy").set("island-0", LinkState())


def dial(proxy: LinkProxy, name: str = "island-0") -> socket.socket:
    host, port = proxy.address(name).split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def both(condition: Condition) -> LinkState:
    return LinkState(up=condition, down=condition)


def echoed(connection: socket.socket, data: bytes) -> bytes:
    """What comes back until the other side is done."""
    sender = threading.Thread(target=lambda: (connection.sendall(data), connection.shutdown(socket.SHUT_WR)))
    sender.start()
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    sender.join()
    return b"".join(parts)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(0, 3 << 20), seed=st.integers(0, 99), delay_s=st.sampled_from([0.0, 0.01]))
def test_bytes_arrive_unchanged_and_in_order(proxy: LinkProxy, size: int, seed: int, delay_s: float) -> None:
    proxy.set("island-0", both(Condition(delay_s=delay_s)))
    data = random.Random(seed).randbytes(size)
    with dial(proxy) as connection:
        assert echoed(connection, data) == data


@given(
    pieces=st.lists(st.integers(1, 16 << 10), min_size=200, max_size=400),
    rate=st.floats(1e3, 1e8),
    late=st.floats(0, 0.5),
)
def test_bucket_lets_through_what_the_rate_allows_even_when_sleeps_are_late(
    pieces: list[int], rate: float, late: float
) -> None:
    bucket, now = TokenBucket(), 1000.0
    began = now
    assert bucket.wait_s(1, rate, now) == 0  # the first call after a long time finds the credit for one burst
    for size in pieces:
        while (wait := bucket.wait_s(size, rate, now)) > 0:
            now += wait + late * BURST_S
    assert now - began >= sum(pieces[:-1]) / rate - BURST_S - 1e-5
    assert now - began <= sum(pieces) / rate + late * BURST_S + 1e-5, "time lost by late sleeps is made up for"


def test_limited_link_is_no_faster_than_its_limit(proxy: LinkProxy) -> None:
    rate = 400_000
    proxy.set("island-0", LinkState(up=Condition(bytes_per_s=rate)))
    data = random.Random(1).randbytes(200_000)
    with dial(proxy) as connection:
        began = time.monotonic()
        assert echoed(connection, data) == data
        assert (len(data) - (16 << 10)) / (time.monotonic() - began) <= rate * 1.1


def test_delay_is_at_least_as_set_in_each_direction(proxy: LinkProxy) -> None:
    proxy.set("island-0", both(Condition(delay_s=0.1)))
    with dial(proxy) as connection:
        began = time.monotonic()
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"
        assert time.monotonic() - began >= 0.2


def test_a_delayed_link_keeps_its_bandwidth(proxy: LinkProxy) -> None:
    """Many small messages are on their way at once: they do not wait for each other's delay."""
    proxy.set("island-0", LinkState(up=Condition(delay_s=0.5)))
    with dial(proxy) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent: list[float] = []

        def send() -> None:
            for number in range(100):
                connection.sendall(bytes([number]))
                sent.append(time.monotonic())
            connection.shutdown(socket.SHUT_WR)

        threading.Thread(target=send).start()
        came = b""
        while part := connection.recv(100):
            came += part
        assert came == bytes(range(100)), "a hundred delays one after the other would be longer than the timeout"


def test_a_limit_that_is_lifted_frees_what_waits(proxy: LinkProxy) -> None:
    proxy.set("island-0", LinkState(up=Condition(bytes_per_s=1.0)))
    data = bytes(100_000)
    with dial(proxy) as connection:
        connection.sendall(data)
        assert connection.recv(1) == b"\0"
        proxy.set("island-0", LinkState())
        left = len(data) - 1
        while left:
            left -= len(connection.recv(left))


def test_cut_resets_connections_and_refuses_new_ones_until_it_is_mended(proxy: LinkProxy) -> None:
    with dial(proxy) as connection, dial(proxy, "island-1") as other:
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"
        proxy.set("island-0", LinkState(cut=True))
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
        with pytest.raises(ConnectionRefusedError):
            dial(proxy)
        other.sendall(b"y")
        assert other.recv(1) == b"y", "only one link was cut"
        proxy.set("island-0", LinkState())
        with dial(proxy) as again:
            again.sendall(b"z")
            assert again.recv(1) == b"z"


def test_dropped_bytes_vanish_without_a_word_and_then_the_connection_ends(proxy: LinkProxy) -> None:
    with dial(proxy) as connection:
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"
        proxy.set("island-0", LinkState(drop=True))
        connection.sendall(b"lost")
        with dial(proxy) as newcomer:
            newcomer.sendall(b"lost too")
            while len(proxy._links["island-0"]._open) < 3:  # the first, its way to the server, and the newcomer
                time.sleep(0.01)
            proxy.set("island-0", LinkState())
            for one in (connection, newcomer):
                with pytest.raises(ConnectionResetError):
                    one.recv(1)
    with dial(proxy) as again:
        assert echoed(again, b"whole") == b"whole"


def test_corruption_flips_single_bits_about_as_often_as_set(proxy: LinkProxy) -> None:
    proxy.set("island-0", LinkState(up=Condition(corrupt_every_bytes=1000)))
    data = bytes(1_000_000)
    with dial(proxy) as connection:
        came = echoed(connection, data)
    assert len(came) == len(data)
    flipped = [byte for byte in came if byte]
    assert 800 < len(flipped) < 1200
    assert all(byte & (byte - 1) == 0 for byte in flipped)


def test_a_receiver_that_does_not_read_holds_up_its_sender(proxy: LinkProxy, echo: Echo) -> None:
    echo.reading.clear()
    try:
        with dial(proxy) as connection:
            connection.sendall(b"x")
            connection.setblocking(False)
            taken, chunk = 0, bytes(1 << 16)
            quiet_since = time.monotonic()
            while time.monotonic() - quiet_since < 1.0:
                try:
                    taken += connection.send(chunk)
                    quiet_since = time.monotonic()
                except BlockingIOError:
                    threading.Event().wait(0.01)
            kernel = 4 * (16 << 20)
            assert taken < BUFFER_BYTES + kernel, "what is on its way is bounded"
    finally:
        echo.reading.set()


def test_a_syncer_that_is_not_there_looks_like_a_broken_connection(free_port: int) -> None:
    lonely = LinkProxy(["island-0"], ("127.0.0.1", free_port))
    try:
        # The reset may come before the connection counts as made.
        with pytest.raises(ConnectionResetError), dial(lonely) as connection:
            connection.recv(1)
    finally:
        lonely.close()
