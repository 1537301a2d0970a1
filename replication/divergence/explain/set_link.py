"""A check's connection to a running replica set: questions to the agents, entries into the log, entries from it."""

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from adapters.changes import Barrier, Change, Member, Repair
from replication.model.config import Cluster, ReplicaSetConfig
from replication.model.events import log_type, write_body
from replication.model.values import pack_values
from replication.policies import policy_of
from replication.rpc.calls import R, Read, ReplicaRequest
from replication.rpc.control import KEY_TTL_S, control_key
from replication.rpc.conversation import Caller
from tops.client.site import Site
from tops.model.constraints import AnyConstraint, AtLeast, OnlyFrom
from tops.model.ids import TxId
from tops.model.transactions import TxType
from tops.protocol.messages import LogEntry, LogStateReported

REQUEST_S = 30.0


class SetLink:
    """One replica set, as a check talks to it; `linked` makes it."""

    def __init__(self, site: Site, config: ReplicaSetConfig, caller: Caller) -> None:
        self.config, self.policy = config, policy_of(config)
        self._site, self._caller = site, caller
        self._log_type = log_type(config.name)

    async def request(self, replica: str, request: ReplicaRequest[R], timeout_s: float = REQUEST_S) -> R:
        return await self._caller.request(self.config.site_of(replica), request, timeout_s)

    async def publish(self, control: Barrier | Repair, changes: Sequence[Change] = ()) -> int:
        """Enter a transaction of the check's own into the log, ordered with all others; returns its number.

        It asks for no more replicas than there are: a check must be possible when a write is not."""
        plan = self.policy.plan()
        sites = self.config.sites()
        constraints: tuple[AnyConstraint, ...] = ()
        if plan.tx_type is TxType.DISTRIBUTED:
            constraints = (AtLeast(1, sites), OnlyFrom(sites))
        tx = TxId(f"{self._site.name}.{secrets.token_hex(8)}")
        member = Member(tx, tuple(changes), control_key(control), KEY_TTL_S, control=control)
        outcome = await self._site.execute(
            self._log_type,
            plan.tx_type,
            events=[write_body(member)],
            limit=plan.limit,
            constraints=constraints,
            local_outcome=plan.local_outcome,
            operator=True,
        )
        return outcome.log_number or 0

    async def applied(self, replica: str, number: int, wait_s: float) -> None:
        """Return once the replica has applied the log up to a number; NotReachable if it does not get there in time."""
        request = Read(sql="select 1", args=pack_values([]), at_least=number, wait_s=wait_s)
        await self.request(replica, request, wait_s + REQUEST_S)

    async def log(self) -> LogStateReported:
        """From where to where the log is kept."""
        return await self._site.get_log_state(self._log_type, timeout_s=REQUEST_S)

    def entries(self, first: int, last: int) -> AsyncIterator[LogEntry]:
        return self._site.read_log(self._log_type, first, last)


@asynccontextmanager
async def linked(
    cluster: Cluster, set_name: str, *, keys: Path | None = None, operator: str = ""
) -> AsyncIterator[SetLink]:
    """Connect to a set through one of the cluster's brokers. Raises NotReachable if none answers.

    `keys` is the folder that `tops keys issue` wrote for `operator`; without keys any name will do."""
    config, brokers = cluster.replica_set(set_name), cluster.config
    async with Site.connect(
        cluster.urls(),
        name=operator or (None if keys is not None else "divergence"),
        instance=secrets.token_hex(4),
        cluster=brokers.cluster.name,
        keys=keys,
        insecure=brokers.cluster.insecure,
    ) as site:
        caller = Caller(site, set_name, site.brokers)
        await caller.start()
        await site.advertise(log_type(set_name))
        yield SetLink(site, config, caller)
