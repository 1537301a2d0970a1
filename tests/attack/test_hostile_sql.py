"""Hostile SQL in reads and writes, through a set and by its own logins: the database's privileges hold it.

The verdicts are kept beside the attacks; `TOPS_RECORD=1` writes them anew, to be reviewed as a change.
"""

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest

from adapters import EmbeddedPostgres, Logins
from adapters.changes import Insert, Statement, Update
from adapters.postgres.sql.logins import Roles, with_login
from replication import ReplicaSet
from replication.model.config import ReplicaConfig, ReplicaSetConfig
from replication.operations.login_grants import grants_text
from tests.attack.hostile_sql import (
    OUTSIDE,
    OWNED,
    VERDICTS_FILE,
    Attack,
    Verdicts,
    attacks,
    changed,
    digest,
    known_verdicts,
    queries,
    reason,
    recorded,
    sample,
    verdict,
)
from tests.integration.replication.clusters import SCHEMA
from tests.integration.replication.inprocess import SmallCluster, small_cluster
from tests.support.hostile_client import trusting_agents, unchecked
from tests.support.logins import PASSWORDS, logins_in
from tops.model.errors import TopsError

TABLES = ["accounts", "transfers"]
QUERY = """
select current_user::text, session_user::text, current_setting('statement_timeout'), current_setting('lock_timeout'),
       current_setting('search_path'), current_setting('default_transaction_read_only'), current_setting('timezone'),
       current_setting('transaction_read_only'), current_setting('application_name'), current_setting('role'),
       current_setting('session_replication_role'), current_setting('my.own', true)
"""
Provisioner = Callable[[EmbeddedPostgres, str], Awaitable[Logins]]


async def ours(server: EmbeddedPostgres, database: str) -> Logins:
    """As an embedded server gives itself its logins."""
    return await logins_in(server, database, tables=TABLES)


async def by_hand(server: EmbeddedPostgres, database: str) -> Logins:
    """As a DBA makes them: by what `tops doctor --print-grants` prints."""
    dsn = server.dsn_for(database)
    replica = ReplicaConfig(name="r1", broker="b1", dsn=dsn)
    config = ReplicaSetConfig(name="shop", policy="write-all", tables=TABLES, replica=[replica])
    roles = Roles.named_for(database, "shop")
    users = (roles.agent, roles.read, roles.write, roles.check)
    passwords = (f"alter role {user} password '{control}'" for user, control in zip(users, PASSWORDS, strict=True))
    connection = await asyncpg.connect(dsn)
    await connection.execute("\n".join(grants_text(config)) + ";\n".join(passwords))
    await connection.close()
    return Logins(*(with_login(dsn, user, control) for user, control in zip(users, PASSWORDS, strict=True)))


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(settings={"fsync": "off", "max_connections": "200"}) as running:
        yield running


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="tops-attack-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@asynccontextmanager
async def attacked(server: EmbeddedPostgres, folder: Path, provisioner: Provisioner) -> AsyncIterator[SmallCluster]:
    keys = f'policy = "write-all"\ntables = {TABLES}'
    async with small_cluster(
        server, folder, keys, replicas=2, schema=f"{SCHEMA}{OUTSIDE}", provisioner=provisioner
    ) as small:
        yield small


async def direct(dsn: str, sql: str) -> str:
    """What PostgreSQL says to somebody who has the login itself."""
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(sql, timeout=20)
    except (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
        return verdict(error)
    finally:
        connection.terminate()
    return "harmless"


async def through(work: Awaitable[object]) -> str:
    try:
        await work
    except TopsError:
        return "rejected"
    return "harmless"


async def assault(small: SmallCluster, shop: ReplicaSet, chosen: Sequence[Attack]) -> list[tuple[str, Verdicts]]:
    """Every attack in every way; raises at the first that changes anything, or is carried out without being listed."""
    server, logins = small.server, small.agents["r1"].database.logins
    admin = await asyncpg.connect(server.dsn_for(small.databases["r1"]))
    try:
        by_login = [await _directly(admin, server, logins, attack) for attack in chosen]
        before = await digest(admin, server, memory=False)
        pristine = (await shop.fetch(QUERY, replica="r1"))[0]
        found = []
        for attack, (read, write) in zip(chosen, by_login, strict=True):
            api_read = await through(shop.read(attack.sql, replica="r1"))
            for _ in range(3 if api_read == "harmless" else 0):  # once it is known, it is quick
                await through(shop.fetch(attack.sql, replica="r1"))
            assert (await shop.fetch(QUERY, replica="r1"))[0] == pristine, f"a session was left changed by {attack}"
            api_write = await through(shop.write([Statement(attack.sql)]))
            assert changed(before, await digest(admin, server, memory=False)) == [], f"changed by {attack}, by the set"
            verdicts = Verdicts(read, write, api_read, api_write)
            assert "harmless" not in verdicts or reason(attack.sql) is not None, f"carried out: {attack}: {verdicts}"
            found.append((attack.sql, verdicts))
        return found
    finally:
        await admin.close()


async def _directly(
    admin: asyncpg.Connection, server: EmbeddedPostgres, logins: Logins, attack: Attack
) -> tuple[str, str]:
    before = await digest(admin, server, memory=True)
    verdicts = await direct(logins.read, attack.sql), await direct(logins.write, attack.sql)
    assert changed(before, await digest(admin, server, memory=True)) == [], f"changed by {attack}, directly"
    return verdicts


async def serves(shop: ReplicaSet) -> None:
    """Everybody is still there, and what was written once is not written twice."""
    again = await shop.write([Update("accounts", {"id": 1}, add={"balance": 1})], idempotency_key="once")
    assert again.duplicate
    await shop.write([Update("accounts", {"id": 1}, add={"balance": 1})])
    await shop.wait_in_sync()
    assert [row["balance"] for row in await shop.fetch("select balance from accounts")] == [2]
    assert not OWNED.exists()


async def ready(shop: ReplicaSet) -> None:
    await shop.write([Insert("accounts", {"id": 1, "balance": 0})])
    await shop.write([Update("accounts", {"id": 1}, add={"balance": 1})], idempotency_key="once")
    await shop.wait_in_sync()


@pytest.mark.parametrize("provisioner", [ours, by_hand], ids=["embedded", "plain"])
async def test_a_sample_of_hostile_sql_finds_every_door_closed(
    server: EmbeddedPostgres, folder: Path, provisioner: Provisioner, monkeypatch: pytest.MonkeyPatch
) -> None:
    unchecked(monkeypatch)
    async with attacked(server, folder, provisioner) as small, small.connect() as shop:
        await ready(shop)
        found = await assault(small, shop, sample())
        await serves(shop)

    known = known_verdicts()
    assert found == [(sql, known[sql]) for sql, _ in found]


@pytest.mark.long
@pytest.mark.parametrize("provisioner", [ours, by_hand], ids=["embedded", "plain"])
async def test_all_hostile_sql_finds_every_door_closed(
    server: EmbeddedPostgres, folder: Path, provisioner: Provisioner, monkeypatch: pytest.MonkeyPatch
) -> None:
    unchecked(monkeypatch)
    async with attacked(server, folder, provisioner) as small, small.connect() as shop:
        await ready(shop)
        found = await assault(small, shop, attacks())
        await serves(shop)

    if os.environ.get("TOPS_RECORD"):
        VERDICTS_FILE.write_text(recorded(found))
    assert dict(found) == known_verdicts()


@pytest.mark.long
async def test_the_database_alone_holds_hostile_sql(
    server: EmbeddedPostgres, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody looks into the SQL, neither the client nor the agent: privileges do all the work.

    Of what is about rows: that a read is one query, and no COMMIT, is for PostgreSQL's parser to say."""
    unchecked(monkeypatch)
    trusting_agents(monkeypatch)
    async with attacked(server, folder, ours) as small, small.connect() as shop:
        await ready(shop)
        await assault(small, shop, queries())
        await serves(shop)


async def test_a_door_left_open_is_noticed(
    server: EmbeddedPostgres, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unchecked(monkeypatch)

    async def careless(server: EmbeddedPostgres, database: str) -> Logins:
        logins = await ours(server, database)
        connection = await asyncpg.connect(server.dsn_for(database))
        await connection.execute(f'grant update on outside to "{Roles.named_for(database, "shop").write}"')
        await connection.close()
        return logins

    async with attacked(server, folder, careless) as small, small.connect() as shop:
        await ready(shop)
        with pytest.raises(AssertionError, match=r"changed by .*update outside"):
            await assault(small, shop, [Attack("other-tables", "update outside set id = 2")])


def test_there_are_enough_attacks_and_each_that_is_carried_out_has_a_reason() -> None:
    texts = [attack.sql for attack in attacks()]
    known = known_verdicts()

    assert len(texts) >= 300
    assert len(set(texts)) == len(texts)
    assert set(known) == set(texts)
    assert [sql for sql, verdicts in known.items() if "harmless" in verdicts and reason(sql) is None] == []
    through_the_set = [sql for sql, v in known.items() if "harmless" in (v.api_read, v.api_write)]
    assert len(through_the_set) < len(texts) / 10, "what a set carries out is a short list"
