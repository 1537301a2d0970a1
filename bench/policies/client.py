"""A TOPS client of the harness: an application's use of `replication.connect`, one operation at a time.

It does what the clients of the peers do: hands over one transaction, waits for the outcome, looks at the row counts.
Changes are row changes, as the API offers them; `READ` is a query of consistency `any`.
"""

from adapters.changes import Change, Insert, Update
from bench.systems import Client, OperationAborted, OperationUnknown
from bench.workloads import Add, Append, Operation, Read, Transfer
from replication import ReplicaSet
from replication.client.writes import WriteResult
from tops.model.errors import OutcomeUnknown, Retry, TopsError

READ = "select bal from accounts where id = $1"


class TopsClient(Client):
    """One coroutine's worth of work on a connected replica set, which belongs to whoever made it."""

    def __init__(self, replica_set: ReplicaSet) -> None:
        self.replica_set = replica_set

    async def execute(self, operation: Operation) -> None:
        try:
            if isinstance(operation, Read):
                await self.replica_set.fetchval(READ, operation.key)
                return
            result = await self.replica_set.write(self.changes_of(operation))
        except OutcomeUnknown as error:
            raise OperationUnknown(str(error)) from error
        except TopsError as error:
            if error.retry is Retry.ASK_FIRST:
                raise OperationUnknown(str(error)) from error
            raise OperationAborted(str(error)) from error
        _expect_one_row_each(operation, result)

    def changes_of(self, operation: Add | Transfer | Append) -> list[Change]:
        return changes_of(operation)

    async def close(self) -> None:
        """The connection is shared."""


def changes_of(operation: Add | Transfer | Append) -> list[Change]:
    """The operation as one transaction's changes."""
    match operation:
        case Add(key, amount):
            return [Update("accounts", {"id": key}, add={"bal": amount})]
        case Transfer(id, source, target, amount):
            row = {"id": id, "source": source, "target": target, "amount": amount}
            legs = [Update("accounts", {"id": leg.key}, add={"bal": leg.amount}) for leg in operation.updates()]
            return [*legs, Insert("transfers", row)]
        case Append(id, payload):
            return [Insert("entries", {"id": id, "payload": payload})]


def _expect_one_row_each(operation: Operation, result: WriteResult) -> None:
    """Where a write is acknowledged from the log, the counts are not told, and the harness checks the sums alone."""
    for count in result.rows:
        if count != 1:
            raise OperationAborted(f"{operation} changed {result.rows} rows")
