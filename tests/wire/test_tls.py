"""Learners and syncers that check each other's certificates, and what is said when they cannot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import trustme
from islands import batches, learner_threads, small_model, together, train, versions
from torch import nn

import skerry
from skerry.admin import describe
from skerry.config import SyncConfig
from skerry.errors import ConfigError, WireError
from skerry.wire.channel import TLS, open_channel

TIMEOUT_S = 1.0
SYNC = SyncConfig(fragments=2, every=2, overlap=0, quorum=1)


@dataclass(frozen=True)
class Certificates:
    ca: str
    syncer: TLS
    """A syncer that is checked, and checks learners."""
    checked_only: TLS
    """A syncer that takes any learner."""
    learner: TLS
    """A learner with a certificate of its own."""


def issue(folder: Path) -> Certificates:
    folder.mkdir()
    authority = trustme.CA()

    def pem(name: str, *identities: str) -> TLS:
        leaf = authority.issue_cert(*identities)
        (folder / f"{name}.key").write_bytes(leaf.private_key_pem.bytes())
        (folder / f"{name}.pem").write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        return TLS(ca, str(folder / f"{name}.pem"), str(folder / f"{name}.key"))

    ca = str(folder / "ca.pem")
    authority.cert_pem.write_to_path(ca)
    syncer = pem("syncer", "127.0.0.1", "localhost")
    return Certificates(ca, syncer, TLS("", syncer.cert, syncer.key), pem("learner", "island-0.example.org"))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return issue(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return issue(tmp_path_factory.mktemp("tls") / "theirs")


@pytest.fixture
def serve(tmp_path: Path, start_syncer) -> Callable[[TLS | None], str]:
    def start(tls: TLS | None) -> str:
        skerry.create(tmp_path / "run", small_model(), SYNC)
        return start_syncer(tmp_path / "run", tls=tls).address

    return start


def join(address: str, tls: TLS | None, timeout_s: float = 30.0) -> tuple[skerry.Learner, nn.Module, torch.optim.Optimizer]:
    model = small_model(seed=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return skerry.join(address, model, optimizer, name="island-0", tls=tls, timeout_s=timeout_s), model, optimizer


def assert_trains(address: str, tls: TLS, folder: Path) -> None:
    learner, model, optimizer = join(address, tls)
    train(model, optimizer, batches(0, 4))
    learner.leave(timeout_s=30)
    assert min(versions(folder)) >= 1


def assert_no_answer(address: str, tls: TLS | None, reason: str = "") -> None:
    """Neither a question nor a learner gets through; both say so in one line and leave nothing running."""

    def fails(ask: Callable[[], object]) -> None:
        with pytest.raises(WireError, match=f"no syncer answered at {address} within 1 s: .*{reason}") as error:
            ask()
        assert "\n" not in str(error.value)

    together(
        lambda: fails(lambda: describe(address, tls, timeout_s=TIMEOUT_S)),
        lambda: fails(lambda: join(address, tls, timeout_s=TIMEOUT_S)),
    )
    assert not learner_threads()


def test_a_learner_checks_the_syncer(serve, certificates: Certificates, tmp_path: Path) -> None:
    assert_trains(serve(certificates.checked_only), TLS(ca=certificates.ca), tmp_path / "run")


def test_learner_and_syncer_check_each_other(serve, certificates: Certificates, tmp_path: Path) -> None:
    assert_trains(serve(certificates.syncer), certificates.learner, tmp_path / "run")


def test_tls_comes_from_the_environment(serve, certificates: Certificates, tmp_path: Path, monkeypatch) -> None:
    for name in ("ca", "cert", "key"):
        monkeypatch.setenv(f"SKERRY_TLS_{name.upper()}", getattr(certificates.learner, name))
    learner, _, _ = join(serve(certificates.syncer), None)
    learner.leave(timeout_s=30)


def test_a_learner_without_a_certificate_is_refused_by_a_syncer_that_checks(serve, certificates: Certificates) -> None:
    assert_no_answer(serve(certificates.syncer), TLS(ca=certificates.ca))


def test_a_learner_with_a_certificate_of_another_authority_is_refused(
    serve, certificates: Certificates, strangers: Certificates
) -> None:
    assert_no_answer(serve(certificates.syncer), TLS(certificates.ca, strangers.learner.cert, strangers.learner.key))


def test_a_syncer_of_another_authority_is_refused(serve, certificates: Certificates, strangers: Certificates) -> None:
    assert_no_answer(serve(certificates.checked_only), TLS(ca=strangers.ca), "CERTIFICATE_VERIFY_FAILED")


def test_a_syncer_under_another_name_is_refused(serve, certificates: Certificates) -> None:
    # The certificate is a good one, but for an island and not for this address.
    assert_no_answer(serve(TLS("", certificates.learner.cert, certificates.learner.key)), TLS(ca=certificates.ca))


def test_a_learner_in_plain_text_gets_no_answer_from_a_syncer_with_tls(serve, certificates: Certificates) -> None:
    assert_no_answer(serve(certificates.checked_only), None)


def test_a_learner_with_tls_gets_no_answer_from_a_syncer_in_plain_text(serve, certificates: Certificates) -> None:
    assert_no_answer(serve(None), TLS(ca=certificates.ca))


@pytest.mark.parametrize("name", ["ca", "cert", "key"])
def test_a_missing_file_is_named(certificates: Certificates, tmp_path: Path, name: str) -> None:
    files = {"ca": certificates.ca, "cert": certificates.learner.cert, "key": certificates.learner.key}
    tls = TLS(**{**files, name: str(tmp_path / "nowhere.pem")})
    for read in (tls.channel_credentials, tls.server_credentials):
        with pytest.raises(ConfigError, match=f"TLS {name} file .*nowhere.pem cannot be read: No such file or directory"):
            read()


def test_certificate_and_key_belong_together(certificates: Certificates) -> None:
    with pytest.raises(ConfigError, match="TLS cert and key must be given together"):
        TLS(ca=certificates.ca, cert=certificates.learner.cert).channel_credentials()
    with pytest.raises(ConfigError, match="a syncer with TLS needs both a cert and a key file"):
        TLS(ca=certificates.ca).server_credentials()


def test_tls_is_what_opens_other_addresses(certificates: Certificates) -> None:
    async def open_and_close() -> None:
        await open_channel("syncer.example.org:7070", TLS(ca=certificates.ca)).close()

    asyncio.run(open_and_close())
