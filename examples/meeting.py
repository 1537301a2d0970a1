"""The meeting of the thesis: mandatory and optional attendees, a room, and a minimum of attendees.

A meeting takes place if the room, everybody who must come and at least three people in all commit to it. Who only may
come can stay away. The constraints are tested when the census closes, and again when everybody has voted.

    python -m examples.meeting
"""

import asyncio
from contextlib import AsyncExitStack

from examples.local_cluster import local_cluster
from tops import EventType, Participant, Scope, ScopeLimit, Site, TxType
from tops.model import constraints
from tops.model.errors import TransactionAborted
from tops.protocol.messages import CensusPolicy

MEETING = EventType("meeting", {"day": str, "topic": str})
MUST, MAY, ROOM = ("anna", "ben"), ("cleo", "dora"), "room-7"
WANTED = (
    constraints.Required(frozenset({*MUST, ROOM})),
    constraints.OnlyFrom(frozenset({*MUST, *MAY, ROOM})),
    constraints.MinParticipants(4),
)


class Calendar(Participant):
    """One attendee's calendar, or the room's: says no when it is taken on that day."""

    scope = Scope.DISTRIBUTED

    def __init__(self, taken: set[str]) -> None:
        super().__init__()
        self.taken, self.entries, self._asked = taken, [], {}  # type: ignore[var-annotated]

    def on_notify_tx(self, event) -> None:  # type: ignore[no-untyped-def]
        self._asked[event.tx] = event.body["day"]

    def on_prepare(self, tx: str) -> None:
        if self._asked[tx] in self.taken:
            raise ValueError(f"taken on {self._asked[tx]}")

    def on_commit(self, tx: str) -> None:
        self.entries.append(self._asked[tx])
        self.taken.add(self._asked[tx])


async def propose(site: Site, day: str) -> bool:
    try:
        async with site.transaction(
            MEETING,
            TxType.DISTRIBUTED,
            limit=ScopeLimit.DISTRIBUTED,
            constraints=WANTED,
            census=CensusPolicy(timeout_s=2.0, replies=5),
        ) as tx:
            await tx.publish(MEETING, {"day": day, "topic": "replication"})
    except TransactionAborted as aborted:
        print(f"{day}: no meeting ({aborted.reason})")
        return False
    print(f"{day}: the meeting takes place")
    return True


async def main() -> dict[str, list[str]]:
    calendars = {
        "anna": Calendar({"monday"}),  # must come and can't on Monday
        "ben": Calendar(set()),
        "cleo": Calendar({"tuesday"}),  # may come, and stays away on Tuesday
        "dora": Calendar({"wednesday"}),
        ROOM: Calendar({"wednesday"}),
    }
    schema = "create table nothing (id int primary key);"
    async with (
        local_cluster("calendar", 'policy = "write-all"', schema, replicas=1) as cluster,
        AsyncExitStack() as sites,
    ):

        async def connected(name: str) -> Site:
            return await sites.enter_async_context(Site.connect(cluster.urls(), name=name, cluster="calendar"))

        for name, calendar in calendars.items():
            await (await connected(name)).subscribe(MEETING, participant=calendar)
        organiser = await connected("organiser")
        await organiser.advertise(MEETING)
        for day in ("monday", "tuesday", "wednesday"):
            await propose(organiser, day)
    return {name: calendar.entries for name, calendar in calendars.items()}


if __name__ == "__main__":
    kept = asyncio.run(main())
    assert kept == {"anna": ["tuesday"], "ben": ["tuesday"], "cleo": [], "dora": ["tuesday"], ROOM: ["tuesday"]}, kept
