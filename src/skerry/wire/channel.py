"""Addresses, TLS and channel options, for both ends. Plain text is allowed on loopback only."""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from skerry.errors import ConfigError, WireError

PROTOCOL = 8
EVERY_INTERFACE = ("0.0.0.0", "::", "[::]")
"""Hosts to listen on that are no address to dial."""

# Messages are small, or hold one chunk. Keep-alive detects a dead peer on a silent path and keeps NAT entries open. Local
# subchannel pools stop gRPC from sharing one TCP connection between control and bulk streams.
CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.max_send_message_length", 4 << 20),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    # Despite its name, this is also the timeout for establishing a connection. Long links with TLS and busy machines need time.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
]
SERVER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.max_send_message_length", 4 << 20),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
]


@dataclass(frozen=True)
class TLS:
    """Paths of PEM files.

    A syncer needs `cert` and `key`, and `ca` to verify learners (mutual TLS). A learner needs `ca` to verify the syncer, and
    `cert` and `key` if the syncer verifies learners.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""

    @staticmethod
    def from_environment() -> TLS | None:
        """TLS from SKERRY_TLS_CA, SKERRY_TLS_CERT and SKERRY_TLS_KEY; None if none is set."""
        values = {name: os.environ.get(f"SKERRY_TLS_{name.upper()}", "") for name in ("ca", "cert", "key")}
        return TLS(**values) if any(values.values()) else None

    def _read(self, name: str) -> bytes | None:
        path = getattr(self, name)
        if not path:
            return None
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"TLS {name} file {path} cannot be read: {error.strerror}") from None

    def channel_credentials(self) -> grpc.ChannelCredentials:
        if bool(self.cert) != bool(self.key):
            raise ConfigError("TLS cert and key must be given together")
        return grpc.ssl_channel_credentials(self._read("ca"), self._read("key"), self._read("cert"))

    def server_credentials(self) -> grpc.ServerCredentials:
        key, cert, ca = self._read("key"), self._read("cert"), self._read("ca")
        if key is None or cert is None:
            raise ConfigError("a syncer with TLS needs both a cert and a key file")
        return grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=ca is not None)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`. Raises ConfigError."""
    host, separator, port = address.rpartition(":")
    host = host.strip("[]")
    if not separator or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"address must be host:port, got {address!r}")
    return host, int(port)


def with_port(address: str, port: int) -> str:
    """The address with its port replaced."""
    return f"{address.rpartition(':')[0]}:{port}"


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_tls_off_loopback(host: str, tls: TLS | None) -> None:
    if tls is None and not is_loopback(host):
        raise ConfigError(
            f"{host} is not this machine, and without TLS anyone on the network path could read and change the model; "
            "set SKERRY_TLS_CA, SKERRY_TLS_CERT and SKERRY_TLS_KEY, or use 127.0.0.1"
        )


def open_channel(address: str, tls: TLS | None) -> grpc.aio.Channel:
    check_reachable(address, tls)
    host, _ = split_address(address)
    # Loopback traffic must not go through an HTTP proxy set in the environment.
    options = [*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0)] if is_loopback(host) else CHANNEL_OPTIONS
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=options)


def check_reachable(address: str, tls: TLS | None) -> None:
    """Raise ConfigError for problems that a retry cannot fix: a malformed address, missing TLS, unreadable TLS files."""
    host, _ = split_address(address)
    require_tls_off_loopback(host, tls)
    if tls is not None:
        tls.channel_credentials()


def bind(server: grpc.aio.Server, address: str, tls: TLS | None) -> int:
    """Listen on an address and return the port. Port 0 picks a free one. Raises ConfigError or WireError."""
    host, wanted = split_address(address)
    require_tls_off_loopback(host, tls)
    try:
        if tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, tls.server_credentials())
    except RuntimeError:
        port = 0
    if port == 0 and tls is not None and _is_free(host, wanted):
        raise ConfigError(f"the TLS files are not usable: cert {tls.cert}, key {tls.key}, ca {tls.ca or 'none'}")
    if port == 0:
        raise WireError(f"cannot listen on {address}: the port is taken or the address is not this machine's")
    assert wanted in (0, port)
    return int(port)


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
