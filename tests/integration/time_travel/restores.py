"""Restores of a cluster's parts: what is put back, what must be seen then, and how the set comes back."""

from collections.abc import Awaitable, Callable

from tests.integration.time_travel.machine import TimeMachine
from tests.support.polling import eventually

Restore = Callable[[TimeMachine], Awaitable[None]]
RESTORES: dict[str, Restore] = {}
OF_TWO_BROKERS = frozenset({"another_brokers_journal", "both_brokers_older"})


def restore(function: Restore) -> Restore:
    RESTORES[function.__name__] = function
    return function


async def _recovered(machine: TimeMachine) -> None:
    recovered = await machine.recover()
    assert recovered.problem == ""
    await machine.goes_on()


@restore
async def broker_older(machine: TimeMachine) -> None:
    copy = await machine.copy_journal(machine.coordinator)
    await machine.write()
    await machine.caught_up()
    await machine.restore_journal(machine.coordinator, copy)

    await machine.is_noticed()
    said = await machine.recover_by_command()
    assert "goes on behind index" in said
    assert "following: r1, r2, r3" in said
    await machine.goes_on()


@restore
async def broker_older_from_a_copy_of_a_running_one(machine: TimeMachine) -> None:
    await machine.write(2)
    copy = await machine.copy_journal(machine.coordinator, running=True)
    await machine.write()
    await machine.caught_up()
    await machine.restore_journal(machine.coordinator, copy)

    await machine.is_noticed()
    await _recovered(machine)


@restore
async def broker_older_and_the_newer_journal_put_back(machine: TimeMachine) -> None:
    older = await machine.copy_journal(machine.coordinator)
    await machine.write()
    await machine.caught_up()
    newest = await machine.copy_journal(machine.coordinator)
    await machine.restore_journal(machine.coordinator, older)
    await machine.is_noticed()

    await machine.restore_journal(machine.coordinator, newest)
    await machine.goes_on()


@restore
async def broker_emptied(machine: TimeMachine) -> None:
    await machine.caught_up()
    await machine.restore_journal(machine.coordinator, None)

    await machine.is_noticed()
    await _recovered(machine)


@restore
async def broker_and_one_replica_to_the_same_time(machine: TimeMachine) -> None:
    await machine.caught_up()
    database = await machine.copy_database("r3")
    journal = await machine.copy_journal(machine.coordinator)
    await machine.write()
    await machine.caught_up()
    await machine.restore_database("r3", database)
    await machine.restore_journal(machine.coordinator, journal)
    await machine.small.start("r3")

    await machine.is_noticed()
    recovered = await machine.recover()
    assert (recovered.problem, len(recovered.behind)) == ("", 1)
    await machine.copied_anew("r3")
    await machine.goes_on()


@restore
async def broker_and_one_replica_to_different_times(machine: TimeMachine) -> None:
    await machine.caught_up()
    database = await machine.copy_database("r3")
    await machine.write(3)
    journal = await machine.copy_journal(machine.coordinator)
    await machine.write(3)
    await machine.caught_up()
    await machine.restore_database("r3", database)
    await machine.restore_journal(machine.coordinator, journal)
    await machine.small.start("r3")

    await machine.is_noticed()
    recovered = await machine.recover()
    assert (recovered.problem, len(recovered.behind)) == ("", 1)
    await machine.copied_anew("r3")
    await machine.goes_on()


@restore
async def broker_and_two_replicas_to_the_same_time(machine: TimeMachine) -> None:
    """Most of the cluster is older; what was acknowledged since is at one replica."""
    await machine.caught_up()
    databases = {replica: await machine.copy_database(replica) for replica in ("r2", "r3")}
    journal = await machine.copy_journal(machine.coordinator)
    await machine.write()
    await machine.caught_up()
    for replica, database in databases.items():
        await machine.restore_database(replica, database)
    await machine.restore_journal(machine.coordinator, journal)
    await machine.small.start("r2", "r3")

    await machine.is_noticed()
    recovered = await machine.recover()
    assert (recovered.problem, len(recovered.behind)) == ("", 2)
    await machine.copied_anew("r2", "r3")
    await machine.goes_on()


@restore
async def one_replica_older(machine: TimeMachine) -> None:
    await machine.caught_up()
    database = await machine.copy_database("r2")
    await machine.write()
    await machine.caught_up()
    await machine.restore_database("r2", database)
    await machine.small.start("r2")

    await machine.goes_on()


@restore
async def every_replica_older(machine: TimeMachine) -> None:
    await machine.caught_up()
    databases = {replica: await machine.copy_database(replica) for replica in ("r1", "r2", "r3")}
    await machine.write()
    await machine.caught_up()
    for replica, database in databases.items():
        await machine.restore_database(replica, database)
    await machine.small.start("r1", "r2", "r3")

    await machine.goes_on()


@restore
async def everything_to_the_same_time(machine: TimeMachine) -> None:
    """A backup of the whole cluster is a cluster: what was written later is not in it, and nobody is told otherwise."""
    await machine.caught_up()
    databases = {replica: await machine.copy_database(replica) for replica in ("r1", "r2", "r3")}
    async with machine.small.connect() as shop:
        await shop.wait_in_sync()
    await machine.small.stop("r1", "r2", "r3")
    journal = await machine.copy_journal(machine.coordinator)
    await machine.small.start("r1", "r2", "r3")
    await machine.write()
    later = machine.acknowledged[-5:]
    for replica, database in databases.items():
        await machine.restore_database(replica, database)
    await machine.restore_journal(machine.coordinator, journal)
    machine.acknowledged = [number for number in machine.acknowledged if number not in later]
    await machine.small.start("r1", "r2", "r3")

    await machine.goes_on()


@restore
async def broker_older_while_one_replica_is_down(machine: TimeMachine) -> None:
    copy = await machine.copy_journal(machine.coordinator)
    await machine.write()
    await machine.caught_up()
    await machine.small.stop("r3")
    await machine.restore_journal(machine.coordinator, copy)
    await machine.is_noticed()

    rejected = await machine.recover()
    if rejected.problem:  # under a quorum two of three are enough
        assert "r3" in rejected.problem
        recovered = await machine.recover(accept_loss=True)
        assert (recovered.problem, len(recovered.silent)) == ("", 1)
    await machine.small.start("r3")
    await machine.goes_on()


@restore
async def another_brokers_journal(machine: TimeMachine) -> None:
    """The broker that does not coordinate the set: its journal means nothing to it."""
    other = next(b.name for b in machine.small.cluster.config.broker if b.name != machine.coordinator)
    copy = await machine.copy_journal(other)
    await machine.write()
    await machine.restore_journal(other, copy)

    await machine.goes_on()


@restore
async def both_brokers_older(machine: TimeMachine) -> None:
    brokers = [broker.name for broker in machine.small.cluster.config.broker]
    copies = {broker: await machine.copy_journal(broker) for broker in brokers}
    await machine.write()
    await machine.caught_up()
    for broker, copy in copies.items():
        await machine.restore_journal(broker, copy)

    await machine.is_noticed()
    await _recovered(machine)


@restore
async def one_replica_from_another_cluster(machine: TimeMachine) -> None:
    """Its position and its history are somebody else's."""
    await machine.caught_up()
    await machine.small.stop("r2")
    await machine.small.sql("r2", "update tops.position set history = repeat('f', 32), digest = repeat('e', 32)")
    await machine.small.sql("r2", "delete from tops.applied")
    await machine.small.sql("r2", "update tops.position set prefix = greatest(prefix, 3)")
    await machine.small.start("r2")

    async def named() -> bool:
        return "holds" in await machine.problem_of("r2")

    await eventually(named, what="the replica says that it holds another history")
    assert not any(r["in_sync"] for r in (await machine.status())["replicas"] if r["replica"] == "r2")
    await machine.copied_anew("r2")
    await machine.goes_on()
