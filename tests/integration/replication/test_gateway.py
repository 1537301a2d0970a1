"""The gateway with real drivers in front of real replicas: reads, writes, errors, and clients that behave badly."""

import asyncio
import shutil
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import pytest
import pytest_asyncio
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from adapters import EmbeddedPostgres
from replication.gateway import client_session
from replication.gateway.messages import PROTOCOL_3, message
from replication.gateway.server import Gateway
from replication.model.config import Cluster
from tests.integration.replication.inprocess import SmallCluster, small_cluster
from tests.support.polling import eventually
from tops.model.errors import ConfigError

WRITE_ALL = 'policy = "write-all"'
PASSWORD = "correct horse"
DONE_S = 60.0


class Front:
    """A gateway and the cluster behind it."""

    def __init__(self, cluster: SmallCluster, gateway: Gateway) -> None:
        self.cluster, self.gateway = cluster, gateway

    async def connect(self, user: str = "anna", password: str = PASSWORD, **options: Any) -> asyncpg.Connection:
        return await asyncpg.connect(
            host="127.0.0.1", port=self.gateway.port, user=user, password=password, database="shop", timeout=DONE_S,
            command_timeout=DONE_S, **options,
        )  # fmt: skip

    @asynccontextmanager
    async def client(self, **options: Any) -> AsyncIterator[asyncpg.Connection]:
        connection = await self.connect(**options)
        try:
            yield connection
        finally:
            await connection.close()

    async def raw(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.gateway.port)


@asynccontextmanager
async def front(
    server: EmbeddedPostgres, folder: Path, keys: str = WRITE_ALL, more: str = "", replicas: int = 2
) -> AsyncIterator[Front]:
    async with small_cluster(server, folder, keys, replicas=replicas) as cluster, AsyncExitStack() as stack:
        path = cluster.cluster.path
        users = "".join(f'[[gateway.user]]\nname = "{name}"\npassword = "{PASSWORD}"\n' for name in ("anna", "bert"))
        table = f'\n[[gateway]]\nname = "g1"\nlisten = "127.0.0.1:0"\nreplica_set = "shop"\n{more}\n{users}'
        path.write_text(path.read_text() + table)
        gateway = await stack.enter_async_context(Gateway.run(Cluster.load(path), "g1"))
        yield Front(cluster, gateway)


async def test_reads_and_writes_of_a_driver(server: EmbeddedPostgres, folder: Path) -> None:
    async with front(server, folder) as shop, shop.client() as client:
        assert await client.execute("insert into accounts (id, balance) values (1, 10), (2, 20)") == "INSERT 0 2"
        assert await client.execute("update accounts set balance = $1 where id = $2", 11, 1) == "UPDATE 1"
        row = await client.fetchrow("update accounts set balance = balance + 1 where id = $1 returning id, balance", 1)
        assert dict(row or {}) == {"id": 1, "balance": 12}
        assert await client.fetchval("select balance from accounts where id = $1", 1) == 12
        assert await client.execute("delete from accounts where id = 2") == "DELETE 1"
        assert await client.fetchval("select count(*) from accounts") == 1

        for replica in ("r1", "r2"):
            rows = await shop.cluster.sql(replica, "select id, balance from accounts")
            assert [tuple(found) for found in rows] == [(1, 12)], replica


@pytest.mark.parametrize(
    ("keys", "consistencies"),
    [
        (WRITE_ALL, ("any", "current", "quorum")),
        ('policy = "quorum"', ("any", "current", "quorum")),
        ('policy = "primary-site"\nprimary = "r1"', ("any", "primary")),
        ('policy = "serializable"', ("any", "current")),
    ],
)
async def test_a_write_is_read_at_once_by_its_user_and_by_others_where_the_consistency_promises_it(
    server: EmbeddedPostgres, folder: Path, keys: str, consistencies: tuple[str, ...]
) -> None:
    async with front(server, folder, keys, replicas=3) as shop, shop.client() as writer:
        async with shop.client() as same, shop.client(user="bert") as other:
            await writer.execute("insert into accounts (id, balance) values (1, 0)")
            for number in range(1, 6):
                assert await writer.execute("update accounts set balance = $1 where id = 1", number) == "UPDATE 1"
                # Applications pool connections: another one of the same user sees it as well.
                assert await same.fetchval("select balance from accounts where id = 1") == number
                for consistency in consistencies[1:]:
                    await other.execute(f"set tops.consistency = '{consistency}'")
                    assert await other.fetchval("select balance from accounts where id = 1") == number, consistency


async def test_values_pass_in_binary_form_both_ways(server: EmbeddedPostgres, folder: Path) -> None:
    schema = (
        "create table things (id int primary key, a bigint, b numeric(12, 3), c text, d boolean, e double precision, "
        "f uuid, g bytea, h date, i timestamp, j timestamptz, k jsonb, l real);"
    )
    things = [
        1, 2**40, Decimal("-12345.670"), "ä\n", True, 0.1, UUID(int=5), b"\0\xff", date(2024, 2, 29),
        datetime(2024, 1, 2, 3, 4, 5, 6), datetime(1999, 1, 2, 3, 4, 5, tzinfo=UTC), '{"a": 1}', 1.5,
    ]  # fmt: skip
    async with small_cluster(server, folder, WRITE_ALL, replicas=2, schema=schema) as cluster:
        path = cluster.cluster.path
        path.write_text(
            path.read_text() + '\n[[gateway]]\nname = "g1"\nlisten = "127.0.0.1:0"\nreplica_set = "shop"\n'
            f'[[gateway.user]]\nname = "anna"\npassword = "{PASSWORD}"\n'
        )
        async with Gateway.run(Cluster.load(path), "g1") as gateway, Front(cluster, gateway).client() as client:
            places = ", ".join(f"${number}" for number in range(1, len(things) + 1))
            written = await client.fetchrow(f"insert into things values ({places}) returning *", *things)
            read = await client.fetchrow("select * from things")

            assert written is not None
            assert list(written.values()) == list(read.values()) == things  # type: ignore[union-attr]
            for number in ("0", "1", "10000", "0.0001", "123456789.5", "-7", "1e8"):
                sql = "update things set b = $1 where id = 1 returning b"
                written = await client.fetchrow(sql, Decimal(number))
                assert written == await client.fetchrow("select b from things")
                assert written is not None
                assert written["b"] == Decimal(number).quantize(Decimal("0.001"))


@pytest.mark.parametrize(
    ("sql", "sqlstate"),
    [
        ("insert into accounts (id, balance) values (1, 1)", "23505"),
        ("insert into nothing values (1)", "42P01"),
        ("select * from nothing", "42P01"),
        ("select 1 / 0", "22012"),
        ("selec 1", "42601"),
        ("create table t (a int primary key)", "0A000"),
        ("listen a", "0A000"),
        ("select pg_advisory_lock(1)", "0A000"),
        ("select * from accounts for update", "0A000"),
        ("set session_replication_role = replica", "42501"),
        ("set tops.consistency = 'sometimes'", "22023"),
        ("set tops.consistency = 'primary'", "22023"),
        ("set tops.max_lag = 'x'", "22023"),
        ("begin read write", "0A000"),
    ],
)
@pytest.mark.parametrize("simple", [True, False], ids=["simple", "extended"])
async def test_errors_have_their_codes_and_end_nothing(shared: Front, sql: str, sqlstate: str, simple: bool) -> None:
    async with shared.client() as client:
        if not simple and sql.startswith("set tops"):
            sqlstate = "0A000"  # a simple query, or an option at start-up, sets these
        with pytest.raises(asyncpg.PostgresError) as error:
            await (client.execute(sql) if simple else client.fetch(sql))

        assert error.value.sqlstate == sqlstate, str(error.value)
        assert await client.fetchval("select count(*) from accounts") == 1


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(server: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Front]:
    folder = tmp_path_factory.mktemp("gateway")
    async with front(server, folder) as shop:
        async with shop.client() as client:
            await client.execute("insert into accounts (id, balance) values (1, 1)")
        yield shop


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_transaction_reads_and_does_not_write(shared: Front) -> None:
    async with shared.client() as client:
        async with client.transaction(isolation="repeatable_read", readonly=True):
            assert await client.fetchval("select count(*) from accounts") == 1
        with pytest.raises(asyncpg.ReadOnlySQLTransactionError):
            async with client.transaction():
                await client.execute("insert into accounts (id, balance) values (5, 5)")
        transaction = client.transaction()
        await transaction.start()
        with pytest.raises(asyncpg.FeatureNotSupportedError):
            await client.execute("create table t (a int)")
        with pytest.raises(asyncpg.InFailedSQLTransactionError):
            await client.fetch("select 1")
        await transaction.rollback()
        assert await client.fetchval("select count(*) from accounts") == 1


async def test_several_writes_before_one_sync_are_rejected_and_none_is_done(shared: Front) -> None:
    async with shared.client() as client:
        with pytest.raises(asyncpg.FeatureNotSupportedError, match="several writes"):
            await client.executemany("insert into accounts (id, balance) values ($1, 1)", [(71,), (72,)])

        assert await client.fetchval("select count(*) from accounts where id > 70") == 0


async def test_settings_of_one_client_are_not_another_s(shared: Front) -> None:
    async with shared.client() as client:
        await client.execute("set work_mem = '3MB'")
        assert await client.fetchval("show work_mem") == "3MB"
    for _ in range(4):
        async with shared.client() as other:
            assert await other.fetchval("show work_mem") != "3MB"


async def test_a_client_chooses_its_consistency_at_start_up(shared: Front) -> None:
    async with shared.client(server_settings={"tops.consistency": "current"}) as client:
        reader = await client.execute("show tops.consistency")
        assert reader == "SHOW"
    with pytest.raises(asyncpg.InvalidParameterValueError):
        await shared.connect(server_settings={"tops.consistency": "sometimes"})


@pytest.mark.parametrize(("user", "password"), [("anna", "wrong password"), ("nobody", PASSWORD)])
async def test_a_wrong_password_and_an_unknown_user_get_the_same_response(
    shared: Front, user: str, password: str
) -> None:
    with pytest.raises(asyncpg.InvalidPasswordError, match=f'password authentication failed for user "{user}"'):
        await shared.connect(user=user, password=password)


async def test_a_query_is_cancelled(shared: Front) -> None:
    async with shared.client() as client:
        sleeping = asyncio.ensure_future(client.fetch("select pg_sleep(50)", timeout=1.0))

        with pytest.raises((asyncpg.QueryCanceledError, TimeoutError)):
            await sleeping
        assert await client.fetchval("select 1") == 1


async def test_psql_reads_and_writes(shared: Front) -> None:
    psql = shutil.which("psql")
    if psql is None:
        pytest.skip("psql is not installed")
    dsn = f"postgresql://anna:{PASSWORD.replace(' ', '%20')}@127.0.0.1:{shared.gateway.port}/shop"
    script = (
        "insert into accounts (id, balance) values (31, 7) returning balance;\nselect balance from accounts "
        "where id = 31;\ndelete from accounts where id = 31;\nbegin;\nselect 5;\ncommit;\n\\echo done\n"
    )
    process = await asyncio.create_subprocess_exec(
        psql, "-X", "-A", "-t", "-v", "ON_ERROR_STOP=1", dsn,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(DONE_S):
        told, complaints = await process.communicate(script.encode())

    assert complaints == b""
    assert told.decode().split("\n") == ["7", "INSERT 0 1", "7", "DELETE 1", "BEGIN", "5", "COMMIT", "done", ""]


# --------------------------------------------------------------------------------------------------------- bad clients

START = struct.pack(">i", PROTOCOL_3) + b"user\0anna\0\0"
FIRST = struct.pack(">i", len(START) + 4) + START


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n", struct.pack(">i", 2**31 - 1), struct.pack(">ii", 8, 1 << 16), b"\0\0\0\x04",
        FIRST + message(b"Q", b"select 1\0"), FIRST + b"p" + struct.pack(">i", 2**30), FIRST + b"\xff",
        FIRST + message(b"p", b"SCRAM-SHA-256\0"), FIRST + message(b"p", b"PLAIN\0\0\0\0\x01x"),
        struct.pack(">ii", 8, 80877103) + FIRST,
    ],
)  # fmt: skip
async def test_what_is_not_the_protocol_ends_its_own_connection_alone(shared: Front, data: bytes) -> None:
    reader, writer = await shared.raw()
    writer.write(data)
    async with asyncio.timeout(DONE_S):
        told = await reader.read()
    writer.close()

    assert b"FATAL" in told
    async with shared.client() as client:
        assert await client.fetchval("select 1") == 1


async def test_who_never_authenticates_is_cut_off(shared: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_session, "AUTHENTICATE_S", 0.2)
    reader, writer = await shared.raw()
    async with asyncio.timeout(DONE_S):
        assert b"57014" in await reader.read()
    writer.close()


async def test_idle_connections_hold_no_session_of_the_database(server: EmbeddedPostgres, folder: Path) -> None:
    async with front(server, folder, more="pool = 2") as shop, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(shop.client()) for _ in range(40)]

        for client in clients:
            assert await client.execute("select 1") == "SELECT 1"
        assert await asyncio.gather(*(client.execute("select 2") for client in clients)) == ["SELECT 1"] * 40


async def test_a_client_that_does_not_read_is_not_sent_all(shared: Front) -> None:
    client = await shared.connect()
    client._transport.pause_reading()  # type: ignore[attr-defined]  # as a program that is busy
    reading = asyncio.ensure_future(client.execute("select repeat('x', 10000) from generate_series(1, 20000)"))

    async def is_paused() -> bool:
        return any(session._is_paused for session in shared.gateway._sessions.values())

    await eventually(is_paused, what="a client that is not sent more")
    async with shared.client() as other:
        for _ in range(20):
            assert await other.fetchval("select 1") == 1
    (session,) = [session for session in shared.gateway._sessions.values() if session._is_paused]

    assert session._transport.get_write_buffer_size() < 20 * 2**20
    reading.cancel()
    client.terminate()


def certificate(folder: Path) -> None:
    """A certificate of the gateway's own, as an operator makes one."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - timedelta(days=1))
        .not_valid_after(datetime.now(UTC) + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), False)
        .sign(key, hashes.SHA256())
    )
    (folder / "g1.crt").write_bytes(made.public_bytes(Encoding.PEM))
    (folder / "g1.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


async def test_a_driver_that_wants_tls_gets_it(server: EmbeddedPostgres, folder: Path) -> None:
    certificate(folder)
    keys = f'tls_certificate = "{folder}/g1.crt"\ntls_key = "{folder}/g1.key"'
    trusting = ssl.create_default_context(cafile=str(folder / "g1.crt"))
    async with front(server, folder, more=keys) as shop, shop.client(ssl=trusting) as client:
        assert await client.execute("insert into accounts (id, balance) values (1, 2)") == "INSERT 0 1"
        assert await client.fetchval("select balance from accounts") == 2
    with pytest.raises(ConnectionError):
        await shop.connect(ssl=trusting)


async def test_a_gateway_of_an_unknown_set_or_replica_is_an_error_of_the_file(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with small_cluster(server, folder, WRITE_ALL, replicas=2, running=False) as cluster:
        path, text = cluster.cluster.path, cluster.cluster.path.read_text()
        user = f'[[gateway.user]]\nname = "anna"\npassword = "{PASSWORD}"\n'
        for keys, problem in (
            ('replica_set = "other"', "no .*replica_set.* is named 'other'"),
            ('replica_set = "shop"\nreplica = "r9"', "'r9' is no replica of 'shop'"),
            ('replica_set = "shop"\ntls_key = "a"', "belong together"),
        ):
            path.write_text(f'{text}\n[[gateway]]\nname = "g1"\nlisten = "127.0.0.1:0"\n{keys}\n{user}')
            with pytest.raises(ConfigError, match=problem):
                Cluster.load(path)
