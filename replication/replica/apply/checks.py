"""What a replica's agent does for a check: holds a snapshot at a barrier, and guards rows that are to be repaired.

Nobody waits for a check: the replica takes its snapshot between two transactions and goes on. The guard remembers which
of some rows were written since it was set, by the transactions that pass; a repair of such a row is not carried out,
since what it would write was looked at before.
"""

import asyncio
import logging
import math
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import assert_never

import msgspec

from adapters.changes import Change, Member, Repair, Statement
from adapters.resource import Resource
from replication.conflicts.own_statements import REPAIR_CALL
from replication.model.touched_rows import RowKey, columns_of, keys_of, row_key, table_name, tables_named_in
from replication.rpc import calls
from tops.model.errors import ConfigError, NotReachable

HOLD_S = 600.0  # a check that died keeps a database's dead rows alive for no longer
TAKE_S = 5.0  # the replica waits for its snapshot, and for no longer
GUARDS_MAX = 64
# Text forms must not depend on the session that happens to run it. A row that breaks a constraint, or that can't be
# written for another reason of its own, is left as it is: nothing else waits for it. What is wrong with the moment
# (locks, time, space) is not the row's fault: the whole transaction is tried again.
REPAIR_FUNCTION = """
create or replace function tops.repair_row(place text, statements text[]) returns void language plpgsql
    set timezone = 'UTC' set datestyle = 'ISO, YMD' set intervalstyle = 'iso_8601' set extra_float_digits = 1
    set bytea_output = 'hex' set lc_monetary = 'C' as $$
declare one text;
begin
    foreach one in array statements loop
        execute one;
    end loop;
    set constraints all immediate;
exception when others then
    if left(sqlstate, 2) in ('40', '53', '57', '58', 'XX') or sqlstate in ('25006', '55006', '55P03') then
        raise;
    end if;
    raise notice 'row % is not repaired: %', place, sqlerrm;
end $$;
"""

log = logging.getLogger("tops.replication")

ReplicaRequest = calls.PrepareBarrier | calls.BarrierSnapshot | calls.BarrierDone | calls.GuardRows | calls.GuardDone


class AtReplica:
    """The visitor in one replica's agent."""

    def __init__(self, replica: str, resource: Resource) -> None:
        self._replica, self._resource = replica, resource
        self._stops: dict[str, _Stop] = {}
        self._guards: dict[str, _Guard] = {}
        self._expiring: asyncio.Future[None] | None = None

    async def response(self, request: ReplicaRequest) -> calls.AnyResponse:
        match request:
            case calls.PrepareBarrier(barrier=barrier):
                await self._resource.read_own("select 1")  # a connection is at hand when the moment comes
                self._stops[barrier] = _Stop()
                asyncio.get_running_loop().call_later(HOLD_S, self._expire, barrier)
                return calls.OperationDone(text=self._replica)
            case calls.BarrierSnapshot(barrier=barrier, wait_s=wait_s):
                return await self._snapshot(barrier, wait_s)
            case calls.BarrierDone(barrier=barrier):
                await self._end(barrier)
                return calls.OperationDone(text=self._replica)
            case calls.GuardRows(repair=repair, row_keys=row_keys):
                return await self._guard(repair, row_keys)
            case calls.GuardDone(repair=repair):
                self._guards.pop(repair, None)
                return calls.OperationDone(text=self._replica)
        assert_never(request)

    async def close(self) -> None:
        for barrier in list(self._stops):
            await self._end(barrier)

    # ----------------------------------------------------------------------------------------------------- barriers

    def expects(self, barrier: str) -> bool:
        return barrier in self._stops

    async def reached(self, barrier: str) -> None:
        stop = self._stops.get(barrier)
        if stop is None or stop.taken.done():
            return
        try:
            async with asyncio.timeout(TAKE_S):
                told = await self._take(stop)
        except Exception as error:  # whatever it is, it is the check's trouble and not the replica's
            log.warning("no snapshot at a barrier", extra={"replica": self._replica, "reason": str(error)})
            stop.taken.set_exception(NotReachable(f"replica {self._replica} could not take a snapshot: {error}"))
        else:
            stop.taken.set_result(told)

    async def _take(self, stop: "_Stop") -> calls.SnapshotReported:
        snapshot = await stop.held.enter_async_context(self._resource.snapshot())
        shared = await snapshot.share()
        return calls.SnapshotReported(
            replica=self._replica,
            snapshot=shared.name,
            path=shared.path,
            position=snapshot.position.prefix,
            at=datetime.now(UTC).isoformat(),
        )

    async def _snapshot(self, barrier: str, wait_s: float) -> calls.SnapshotReported:
        stop = self._stops.get(barrier)
        if stop is None:
            raise NotReachable(f"replica {self._replica} does not know barrier {barrier}: it was restarted since")
        try:
            async with asyncio.timeout(wait_s):
                return await asyncio.shield(stop.taken)
        except TimeoutError:
            raise NotReachable(f"replica {self._replica} did not reach the barrier within {wait_s:g} s") from None

    def _expire(self, barrier: str) -> None:
        if barrier in self._stops:
            self._expiring = asyncio.ensure_future(self._end(barrier))

    async def _end(self, barrier: str) -> None:
        stop = self._stops.pop(barrier, None)
        if stop is not None:
            await stop.held.aclose()
            if not stop.taken.done():
                stop.taken.set_exception(NotReachable(f"barrier {barrier} was given up"))
            stop.taken.exception()  # told, or nobody asks any more

    # ------------------------------------------------------------------------------------------------------- repairs

    async def _guard(self, repair: str, row_keys: tuple[RowKey, ...]) -> calls.OperationDone:
        if not self._resource.has_own_schema:
            raise ConfigError(f"replica {self._replica}: only PostgreSQL replicas are repaired through the set")
        await self._resource.run_own_script(REPAIR_FUNCTION)
        while len(self._guards) >= GUARDS_MAX:
            del self._guards[next(iter(self._guards))]
        self._guards[repair] = _Guard(frozenset(row_keys))
        return calls.OperationDone(text=self._replica)

    @property
    def watches(self) -> bool:
        return bool(self._guards)

    def saw(self, member: Member, number: int) -> None:
        for guard in self._guards.values():
            guard.saw(member, number)

    def saw_local(self, member: Member) -> None:
        """A write that commits here first: its number is not known yet, and later than any look."""
        for guard in self._guards.values():
            guard.saw(member, math.inf)

    def permitted(self, member: Member, repair: Repair) -> Member:
        guard = self._guards.get(repair.ident)
        if guard is None:
            return msgspec.structs.replace(member, changes=())
        kept = tuple(change for change in member.changes if guard.untouched(change, repair.position))
        return msgspec.structs.replace(member, changes=kept)


class _Stop:
    """A barrier that is waited for, and then the snapshot."""

    def __init__(self) -> None:
        self.taken: asyncio.Future[calls.SnapshotReported] = asyncio.get_running_loop().create_future()
        self.held = AsyncExitStack()


class _Guard:
    """When each of some rows was last written."""

    def __init__(self, row_keys: frozenset[RowKey]) -> None:
        self._row_keys = row_keys
        self._columns = {table: columns_of(key) for table, key in row_keys}
        self._written: dict[RowKey, float] = {}
        self._whole: dict[str, float] = {}  # a table of which some row, nobody knows which, was written

    def saw(self, member: Member, number: float) -> None:
        for change in member.changes:
            for table in self._tables(change):
                keys = keys_of(change, self._columns[table])
                if keys is None:
                    self._whole[table] = number
                    continue
                for key in keys:
                    touched = row_key(table, key)
                    if touched in self._row_keys:
                        self._written[touched] = number

    def _tables(self, change: Change) -> list[str]:
        if isinstance(change, Statement):
            return tables_named_in(change.sql, self._columns)
        name = table_name(change.table)
        return [name] if name in self._columns else []

    def untouched(self, change: Change, position: int) -> bool:
        if not isinstance(change, Statement) or change.sql != REPAIR_CALL:
            return False
        table, key = msgspec.json.decode(change.args[0], type=RowKey)
        return max(self._written.get((table, key), 0), self._whole.get(table, 0)) <= position
