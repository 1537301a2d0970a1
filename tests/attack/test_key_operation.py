"""Keys while everything runs: renewed, revoked, and folders that others can look into."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
import pytest_asyncio
from cryptography import x509

from adapters.embedded.free_ports import free_port
from tests.integration.overlay.cluster import QUICK, ROOT, event_type
from tests.integration.overlay.secured import CLUSTER, Secured, issue, secured_broker
from tests.support.brokers import broker_at, denied
from tests.support.polling import eventually
from tops import Broker, Site
from tops.model.errors import ConfigError, NotReachable, TopsError
from tops.runtime.links import identity
from tops.security import Authority, Kind, NodeKeys, utc_now


@pytest_asyncio.fixture
async def secured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Secured]:
    monkeypatch.setattr(identity, "RELOAD_S", 0.05)
    async with secured_broker(tmp_path) as running:
        yield running


def renew(secured: Secured, name: str, kind: Kind = Kind.SITE) -> Path:
    now = utc_now()
    loaded = NodeKeys.load(secured.authority.folder / "nodes" / name).credentials
    return secured.authority.issue(
        loaded.identity, ["127.0.0.1"], now - timedelta(minutes=5), now + timedelta(days=2), now=now, renew=True
    )


def serial_of(certificate: bytes) -> int:
    return x509.load_der_x509_certificate(certificate).serial_number


def serials_at(broker: Broker) -> list[int]:
    """Of the certificates that the broker's live connections were made with."""
    tls = [socket.get_extra_info("ssl_object") for socket in broker.connections.sockets]
    return [serial_of(connection.getpeercert(binary_form=True)) for connection in tls if connection is not None]


async def test_a_broker_shows_its_renewed_certificate_to_new_connections_and_keeps_the_old_ones(
    secured: Secured,
) -> None:
    first = secured.broker.connections.own.party.credentials
    assert first is not None
    async with secured.site("early") as early:
        renew(secured, "b1", Kind.BROKER)
        secured.broker.reload_keys()
        async with secured.site("late") as late:
            socket = late._node.link._socket  # type: ignore[union-attr]
            assert socket is not None
            shown = socket.get_extra_info("ssl_object").getpeercert(binary_form=True)
            await late.advertise(event_type())
        await early.advertise(event_type())

    assert serial_of(shown) != serial_of(first.certificate_der)
    assert not secured.broker.node.alarms


async def test_a_site_comes_back_with_its_renewed_certificate(secured: Secured) -> None:
    keys = secured.keys("billing")
    async with Site.connect(secured.broker.url, keys=keys, options=QUICK) as site:
        old = NodeKeys.load(keys).credentials.certificate_der
        renew(secured, "billing")
        secured.authority.revoke(f"{serial_of(old):x}", utc_now())
        secured.broker.reload_keys()  # ends the connection that the old certificate made

        await eventually(lambda: serials_at(secured.broker) not in ([], [serial_of(old)]))
        await site.advertise(event_type())


async def test_a_site_leaves_a_broker_whose_certificate_is_revoked(secured: Secured) -> None:
    async with secured.site("billing") as site:
        await site.advertise(event_type())
        secured.authority.revoke("b1", utc_now())

        # The broker itself has not looked yet: it is the site that ends it.
        await eventually(lambda: site._node.link is not None and not site._node.link.connected)


async def test_a_renewal_that_can_t_be_used_is_an_alarm_once_and_changes_nothing(secured: Secured) -> None:
    own, folder = secured.broker.connections.own, secured.broker.table.keys
    assert folder is not None
    before = own.party.credentials
    other = secured.keys("other")
    for spoiled in ("node.crt", "node.key"):  # first the certificate of another identity, then a key that fits neither
        kept = (folder / spoiled).read_bytes()
        (folder / spoiled).write_bytes((other / spoiled).read_bytes())
        secured.broker.reload_keys()
        secured.broker.reload_keys()
        (folder / spoiled).write_bytes(kept)

    assert own.party.credentials is before
    assert len(secured.broker.node.alarms) <= 2
    assert {kind for _, kind, _ in secured.broker.node.alarms} == {"keys"}
    async with secured.site("billing") as site:
        await site.advertise(event_type())


async def test_revocations_count_also_while_the_certificate_on_disk_can_t_be_used(secured: Secured) -> None:
    folder = secured.broker.table.keys
    assert folder is not None
    async with secured.site("traitor") as traitor:
        secured.authority.revoke("traitor", utc_now())
        (folder / "node.crt").write_text("torn")
        secured.broker.reload_keys()
        await eventually(lambda: not secured.broker.connections.sockets)
        assert traitor.name == "traitor"


async def test_who_fails_in_tls_is_audited(secured: Secured, tmp_path: Path) -> None:
    stranger = issue(Authority.init(tmp_path / "other", CLUSTER, utc_now(), 30), "mallory", "admin")
    (stranger / "ca.crt").write_bytes((secured.authority.folder / "ca.crt").read_bytes())
    secured.keys("gone")
    secured.authority.revoke("gone", utc_now())
    secured.broker.reload_keys()
    for keys in (stranger, secured.authority.folder / "nodes" / "gone"):
        with pytest.raises(TopsError):
            async with Site.connect(secured.broker.url, keys=keys, timeout_s=0.5):
                pytest.fail("it must not get in")
    reader, writer = await asyncio.open_connection("127.0.0.1", secured.broker.table.port)
    writer.write(b"GET /healthz HTTP/1.1\r\n\r\n")
    await reader.read()
    writer.close()

    acts = [(record["act"], record["detail"]) for record in denied(secured.broker)]
    assert acts
    assert {act for act, _ in acts} == {"TLS"}


async def test_sighup_reloads_the_keys_of_a_broker_process(tmp_path: Path) -> None:
    authority = Authority.init(tmp_path / "keys", CLUSTER, utc_now(), 30)
    broker, site = issue(authority, "b1", kind=Kind.BROKER), issue(authority, "billing")
    port = free_port()
    file, log = tmp_path / "tops.toml", tmp_path / "b1.log"
    file.write_text(
        f'[cluster]\nname = "{CLUSTER}"\n[[broker]]\nname = "b1"\nlisten = "127.0.0.1:{port}"\n'
        f'data = "{tmp_path / "data"}"\nkeys = "{broker}"'
    )
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tops", "broker", "run", "-c", str(file), "--name", "b1",
            cwd=ROOT, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        async with Site.connect(f"wss://127.0.0.1:{port}", keys=site, options=QUICK, timeout_s=30):
            authority.revoke("billing", utc_now())
            process.send_signal(signal.SIGHUP)
            await eventually(lambda: "is revoked" in log.read_text())
        with pytest.raises((NotReachable, ConfigError)):
            async with Site.connect(f"wss://127.0.0.1:{port}", keys=site, timeout_s=1):
                pytest.fail("it must not get in")
    finally:
        process.terminate()
        assert await process.wait() == 0


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701])
async def test_a_journal_that_others_can_look_into_is_not_used(tmp_path: Path, mode: int) -> None:
    async with broker_at(tmp_path):
        pass
    journal = tmp_path / "data" / "journal"
    assert journal.stat().st_mode & 0o777 == 0o700
    journal.chmod(mode)

    with pytest.raises(ConfigError, match=f"chmod 700 {journal}"):
        async with broker_at(tmp_path):
            pytest.fail("it must not start")


async def test_a_sites_journal_and_a_key_folder_are_checked_too(secured: Secured, tmp_path: Path) -> None:
    keys = secured.keys("billing")
    (tmp_path / "promises").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        async with Site.connect(secured.broker.url, keys=keys, data=tmp_path / "promises"):
            pytest.fail("it must not start")
    keys.chmod(0o770)
    with pytest.raises(ConfigError, match="lets other users replace its files"):
        async with Site.connect(secured.broker.url, keys=keys):
            pytest.fail("it must not start")
