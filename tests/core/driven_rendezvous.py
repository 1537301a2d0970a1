"""A rendezvous with standing participants, driven letter by letter."""

from typing import TypeVar

from tops.core.commit.decision_sender import Sign
from tops.core.commit.epochs import EpochOptions
from tops.core.coordinator.rendezvous import Rendezvous, RendezvousOptions
from tops.model.constraints import AnyConstraint
from tops.model.event_types import EventType
from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId
from tops.model.rejections import Rejection, RejectionCode
from tops.model.transactions import LocalOutcome, Scope, ScopeLimit, TxType
from tops.protocol.effects import Effect, SendTo
from tops.protocol.messages import (
    Address,
    EpochVoted,
    Event,
    FollowLog,
    Message,
    OneShot,
    PrepareEpoch,
    RunOneShot,
    RunOneShots,
    Sender,
    StandingRegistered,
    TxSpec,
    TypeAdvertised,
)

ME = NodeId("b")
SET = EventType("set", {"mark": str, "key": str}, durable=True)
OTHER = EventType("other", {"mark": str, "key": str})
CHILD = EventType("other.child", {}, parent="other")
PUBLISHER = Address(ME, "publisher", 1)
L = TypeVar("L", bound=Message)


def sent_effects(effects: list[Effect], kind: type[L]) -> list[L]:
    return [e.message for e in effects if isinstance(e, SendTo) and isinstance(e.message, kind)]


def history_of(size: int) -> bytes:
    return b"h" * size


class DrivenRendezvous:
    """Letters in, effects out; every effect is kept."""

    def __init__(self, options: RendezvousOptions | None = None, sign: Sign | None = None) -> None:
        self.core = Rendezvous(ME, 1, {}, options or RendezvousOptions(epochs=EpochOptions()), history_of, sign)
        self.sites: dict[str, str] = {}  # who stands behind a voter
        self.effects: list[Effect] = []
        self.now = 0.0
        for definitions in ((SET,), (OTHER,), (OTHER, CHILD)):
            self.deliver(TypeAdvertised(definitions=definitions), PUBLISHER)

    def deliver(self, message: Message, at: Address, sender: Sender | None = None) -> list[Effect]:
        """From the site behind this handle, unless it is stamped otherwise."""
        stamp = sender or Sender(self.sites.get(at.handle, at.handle), "writer", incarnation=at.incarnation)
        effects = self.core.on_message(message, stamp, at, self.now)
        self.effects += effects
        return effects

    def stand(
        self,
        voter: str,
        event_type: str,
        site: str,
        position: int | None = None,
        subscription: int = 1,
        wants: Filter | None = None,
    ) -> list[Effect]:
        """A standing participant (a replica of the log, if it tells its position) is there."""
        self.sites[voter] = site
        answered = StandingRegistered(
            voter=voter,
            event_type=event_type,
            filter=wants or Filter.everything(),
            scope=Scope.DISTRIBUTED,
            secret=b"secret",
            position=position,
            subscription=subscription,
            history=self.history,
            digest=self.digest(position or 0),
        )
        return self.deliver(answered, Address(ME, voter, 1))

    def feed(self, voter: str, site: str, position: int, incarnation: int = 1) -> list[Effect]:
        """A replica asks for the log."""
        wanted = FollowLog(
            name=site,
            definitions=(SET,),
            filter=Filter.everything(),
            position=position,
            start="now",
            credit=100,
            voter=voter,
            history=self.history,
            digest=self.digest(position),
        )
        return self.deliver(wanted, Address(ME, site, incarnation))

    @property
    def history(self) -> str:
        return self.core.logs["set"].chain.history

    def digest(self, index: int) -> str:
        """What a replica of this very log holds; beyond its end something that nobody knows."""
        return self.core.logs["set"].chain.at(index) or "f" * 32

    def one_shot(self, tx: str, spec: TxSpec) -> list[Effect]:
        run = RunOneShot(tx=TxId(tx), spec=spec, events=(Event(spec.event_type, {"mark": tx, "key": "a"}),))
        return self.deliver(run, PUBLISHER)

    def one_shots(self, spec: TxSpec, *transactions: str) -> list[Effect]:
        """Several in one letter."""
        several = [OneShot(TxId(tx), (Event(spec.event_type, {"mark": tx, "key": "a"}),)) for tx in transactions]
        return self.deliver(RunOneShots(spec=spec, transactions=tuple(several)), PUBLISHER)

    def vote(self, prepare: PrepareEpoch, *excluded: TxId, rows: tuple[tuple[int, ...], ...] = ()) -> list[Effect]:
        vote = EpochVoted(
            epoch=prepare.epoch,
            digest=prepare.digest,
            voter=prepare.voter,
            excluded=dict.fromkeys(excluded, Rejection(RejectionCode.PARTICIPANT_FAILED, "refused")),
            rows=rows,
        )
        return self.deliver(vote, Address(ME, prepare.voter, 1))


def standing_only(event_type: str, *constraints: AnyConstraint) -> TxSpec:
    """The specification of a one-shot that asks nobody."""
    return TxSpec(
        event_type,
        TxType.DISTRIBUTED,
        limit=ScopeLimit.LOCAL,
        constraints=constraints,
        local_outcome=LocalOutcome.FOLLOWS,
        census=None,
    )
