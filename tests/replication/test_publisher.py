"""How much a publisher puts into one batch, and what it keeps of the order."""

import asyncio
from typing import Any, cast

from adapters.changes import Member, Statement, encode_member
from adapters.resource import OutboxEntry
from replication.model.events import batch_in, log_type
from replication.policies import TxPlan
from replication.replica.apply.publisher import BATCH_BYTES_MAX, BATCH_MAX, OutboxPublisher
from tops.model.errors import EventTooLarge
from tops.model.ids import TxId
from tops.model.transactions import Access, Outcome, ScopeLimit, TxType
from tops.protocol.messages import Event, TxOutcome
from tops.protocol.set_types import BATCH


class Outbox:
    """What of a resource a publisher uses."""

    def __init__(self, entries: list[OutboxEntry]) -> None:
        self.entries = entries
        self.empty = asyncio.Event()

    async def unpublished(self, limit: int, after: int = 0) -> list[OutboxEntry]:
        return [entry for entry in self.entries if entry.id > after][:limit]

    async def count_unpublished(self, after: int = 0) -> int:
        return sum(len(entry.encoded) for entry in self.entries if entry.id > after)

    async def mark_published(self, up_to: int) -> None:
        self.entries = [entry for entry in self.entries if entry.id > up_to]
        if not self.entries:
            self.empty.set()


class LogSite:
    """A site whose log takes everything."""

    def __init__(self) -> None:
        self.batches: list[list[Member]] = []

    async def execute(self, *_: object, events: list[dict[str, Any]], **__: object) -> TxOutcome:
        self.batches.append(batch_in([Event("rs.shop", body) for body in events]))
        return TxOutcome(TxId("b"), Outcome.COMMITTED, log_number=len(self.batches))


def entry(number: int, *members: Member) -> OutboxEntry:
    return OutboxEntry(number, [encode_member(one) for one in members])


def some(tx: str, size: int = 1) -> Member:
    return Member(TxId(tx), (Statement("x" * size),))


def publisher_of(site: LogSite, outbox: Outbox) -> OutboxPublisher:
    plan = TxPlan(TxType.LOCAL, Access.PRIVATE, ScopeLimit.LOCAL)
    return OutboxPublisher(cast(Any, site), log_type("shop"), cast(Any, outbox), plan)


async def published(entries: list[OutboxEntry]) -> list[list[Member]]:
    site, outbox = LogSite(), Outbox(entries)
    running = asyncio.create_task(publisher_of(site, outbox).run())
    await outbox.empty.wait()
    running.cancel()
    return site.batches


async def test_what_waits_is_one_batch_in_the_order_of_the_commits() -> None:
    members = [some(f"t{n}") for n in range(7)]

    batches = await published([entry(1, *members[:3]), entry(5, *members[3:4]), entry(9, *members[4:])])

    assert batches == [members]


async def test_a_batch_ends_where_a_message_would_become_too_long_and_never_within_an_entry() -> None:
    half = BATCH_BYTES_MAX // 2 + 1
    first, second = entry(1, some("a", half), some("b", half)), entry(2, some("c", half))
    many = [entry(3, *(some(f"t{n}") for n in range(BATCH_MAX))), entry(4, some("last"))]

    batches = await published([first, second, *many])

    assert [[one.tx for one in batch][-1] for batch in batches] == ["b", "c", f"t{BATCH_MAX - 1}", "last"]


async def test_what_is_committed_while_the_publisher_looks_counts_as_unpublished() -> None:
    counted: list[int] = []

    class Busy(Outbox):
        async def unpublished(self, limit: int, after: int = 0) -> list[OutboxEntry]:
            found = await super().unpublished(limit, after)
            if not counted:  # behind what the first look finds
                self.entries.append(entry(2, some("b"), some("c")))
                publisher.wake(2)
            return found

    class Counting(LogSite):
        async def execute(self, *_: object, **options: Any) -> TxOutcome:
            counted.append(publisher.unpublished)
            return await super().execute(**options)

    outbox = Busy([entry(1, some("a"))])
    publisher = publisher_of(Counting(), outbox)
    running = asyncio.create_task(publisher.run())
    await outbox.empty.wait()
    running.cancel()

    assert counted == [3, 2]


async def test_what_is_published_stays_in_the_outbox_until_it_has_come_back_from_the_log() -> None:
    site, outbox = LogSite(), Outbox([entry(1, some("a")), entry(2, some("b"))])
    publisher, reached = publisher_of(site, outbox), ("h", 0)
    publisher.reached = lambda: reached

    await publisher._publish_all()
    await publisher._publish_all()
    kept = [one.id for one in outbox.entries]
    reached = ("h", 1)
    await publisher._publish_all()

    assert (kept, outbox.entries) == ([1, 2], [])
    assert len(site.batches) == 1, "it is published once"


class ShortLog(LogSite):
    """A log that takes nothing that is long."""

    async def execute(self, *_: object, events: list[dict[str, Any]], **options: object) -> TxOutcome:
        if len(events[0][BATCH]) > 2 * BATCH_BYTES_MAX:
            raise EventTooLarge(len(events[0][BATCH]), 2 * BATCH_BYTES_MAX)
        return await super().execute(events=events, **options)


async def test_an_entry_that_is_too_long_is_named_and_holds_up_those_behind_it_until_it_is_taken_out() -> None:
    entries = [entry(1, some("a")), entry(2, some("long", 3 * BATCH_BYTES_MAX)), entry(3, some("c"))]
    site, outbox = ShortLog(), Outbox(entries)
    publisher = publisher_of(site, outbox)

    await publisher._publish_all()
    await publisher._publish_all()
    stuck, waiting = publisher.stuck, publisher.unpublished
    outbox.entries.remove(entries[1])
    publisher.unstick()
    await publisher._publish_all()

    assert stuck is not None
    assert (stuck.entry.id, "transaction long is committed here" in stuck.text, waiting) == (2, True, 2)
    assert [[one.tx for one in batch] for batch in site.batches] == [["a"], ["c"]]
    assert publisher.unpublished == 0


async def test_what_a_log_may_have_lost_is_published_again_when_it_goes_on_in_a_new_history() -> None:
    site, outbox = LogSite(), Outbox([entry(1, some("a"))])
    publisher, reached = publisher_of(site, outbox), ("h", 0)
    publisher.reached = lambda: reached
    await publisher._publish_all()

    reached = ("new", 5)
    await publisher._publish_all()

    assert [[one.tx for one in batch] for batch in site.batches] == [["a"], ["a"]]
