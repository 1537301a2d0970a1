"""Journals and databases put back to another time: it is noticed, nothing is lost silently, and the set comes back."""

from datetime import date
from pathlib import Path

import pytest

from adapters import EmbeddedPostgres
from tests.integration.origin.policies import POLICIES
from tests.integration.replication.inprocess import small_cluster
from tests.integration.time_travel.machine import TimeMachine
from tests.integration.time_travel.restores import OF_TWO_BROKERS, RESTORES, broker_older

ALL = [(name, policy) for name in RESTORES for policy in POLICIES]
ROTATING = [ALL[(date.today().toordinal() * 5 + n * 13) % len(ALL)] for n in range(2)]


async def travel(server: EmbeddedPostgres, folder: Path, name: str, policy: str) -> None:
    brokers = 2 if name in OF_TWO_BROKERS else 1
    async with small_cluster(server, folder, POLICIES[policy], brokers=brokers) as small:
        machine = TimeMachine(small)
        try:
            await machine.write()
            await RESTORES[name](machine)
        finally:
            await machine.close()


@pytest.mark.parametrize("policy", ["quorum", "serializable", "primary-site", "peer-to-peer"])
async def test_an_older_journal_gives_out_no_index_again(server: EmbeddedPostgres, folder: Path, policy: str) -> None:
    await travel(server, folder, broker_older.__name__, policy)


@pytest.mark.parametrize(("name", "policy"), ROTATING)
async def test_some_restores_are_noticed_and_recovered_from(
    server: EmbeddedPostgres, folder: Path, name: str, policy: str
) -> None:
    await travel(server, folder, name, policy)


@pytest.mark.long
@pytest.mark.parametrize(("name", "policy"), ALL)
async def test_every_restore_is_noticed_and_recovered_from(
    server: EmbeddedPostgres, folder: Path, name: str, policy: str
) -> None:
    await travel(server, folder, name, policy)
