"""The end of transactions at one broker: votes, decisions, and when earlier versions of the tables may go.

    Prepare  ── down the tree ──►  own test, sites, children   ── up ──►  RoutingTxVoted
    Decided  ── down the tree ──►  tables, sites               ── both ways ──►  Flip

The tree is rooted at the coordinator's broker. `Flip` goes over a link once this broker and all others on this side of
it have applied the commit. Links keep their order, so when a `Flip` has come from every side no publication that is
stamped with an earlier commit is on its way here, and the earlier version may go.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec

from tops.core.routing_tx.conflicts import conflict_in
from tops.core.routing_tx.settlement import Settlement
from tops.core.routing_tx.steps import Work
from tops.core.routing_tx.tree_routes import TreeRoutes
from tops.model.ids import NodeId, TxId
from tops.model.rejections import Rejection, RejectionCode
from tops.model.routing import RouteKey, TxKind
from tops.protocol.effects import Effect, SendOnLink
from tops.protocol.messages import (
    NO_EPOCH,
    DomainOpened,
    Flip,
    PrepareRoutingTx,
    RoutingTxDecided,
    RoutingTxVoted,
    TxEpoch,
)

ENDED_MAX: Final = 10_000  # transactions whose late steps are recognised
ITSELF: Final = NodeId("")  # the broker's own part of a ballot
RESTARTED: Final = Rejection(RejectionCode.RESTARTED, "a broker or the coordinator was restarted: try again")
UNKNOWN_HERE: Final = Rejection(RejectionCode.RESTARTED, "a broker has ended the transaction already")


class Ballot(msgspec.Struct):
    """The votes that a broker waits for, and what it knows so far."""

    waiting: set[NodeId]
    participants: set[str] = set()
    reached: set[int] = set()
    closed: bool = False  # the vote is sent


class Applied(msgspec.Struct):
    """A commit that is applied here and perhaps not yet everywhere."""

    work: Work
    number: int
    received: set[NodeId] = set()
    sent: set[NodeId] = set()


class Termination:
    """Votes and decisions at one broker."""

    def __init__(
        self,
        routes: TreeRoutes,
        parent: NodeId | None,
        initiator_here: Callable[[TxId], NodeId | None],
        at_root: Callable[[RoutingTxVoted], list[Effect]],
        applied_everywhere: Callable[[TxId], list[Effect]],
    ) -> None:
        """`parent` is the neighbour towards the coordinator, None at its own broker, where votes go to `at_root`."""
        self.routes, self.parent = routes, parent
        self.children = tuple(n for n in routes.neighbours if n != parent)
        self.settlement = Settlement(routes)
        self._initiator_here, self._at_root = initiator_here, at_root
        self._applied_everywhere = applied_everywhere
        self.epoch: TxEpoch = NO_EPOCH
        self.works: dict[TxId, Work] = {}
        self.ballots: dict[TxId, Ballot] = {}
        self.applied: dict[TxId, Applied] = {}
        self.ended: OrderedDict[TxId, bool] = OrderedDict()
        routes.on_sent = self._superseded

    def work(self, tx: TxId, kind: TxKind, hold: bool = False) -> Work:
        """What is kept of a transaction, from its first message on."""
        known = self.works.get(tx)
        if known is None:
            known = self.works[tx] = Work(tx, kind, hold)
        return known

    def _superseded(self, key: RouteKey, link: NodeId) -> None:
        """A neighbour is sent a regular change of an entry: what transactions have sent it before counts no more."""
        for work in self.works.values():
            work.sent.pop((key, link), None)

    # --------------------------------------------------------------------------------------------------------- votes

    def on_prepare(self, prepare: PrepareRoutingTx) -> list[Effect]:
        """Vote, with everything further down the tree. Everybody is asked in any case, so that it also answers."""
        effects: list[Effect] = [SendOnLink(child, prepare) for child in self.children]
        if prepare.tx in self.ended or prepare.epoch != self.epoch:
            return [*effects, *self._send_vote(RoutingTxVoted(tx=prepare.tx, epoch=prepare.epoch, rejection=RESTARTED))]
        work = self.work(prepare.tx, prepare.kind)
        self.open_ballot(work)
        if prepare.kind is TxKind.ISOLATED:
            if problem := conflict_in(self.routes, work.tx, work.executed):
                work.rejection = work.rejection or Rejection(RejectionCode.CONFLICT, problem)
            self.settlement.prepare(work, prepare.number)
        return effects + self.ready(work, prepare.number)

    def open_ballot(self, work: Work) -> None:
        """The broker will vote when it is ready itself and all others further down have voted."""
        self.ballots.setdefault(work.tx, Ballot({*self.children, ITSELF}))

    def ready(self, work: Work, number: int = 0) -> list[Effect]:
        """Nothing more comes that this broker has to process: its sites are asked."""
        ballot = self.ballots[work.tx]
        ballot.waiting.discard(ITSELF)
        initiator = self._initiator_here(work.tx)
        asked = sorted(work.sites - {initiator})
        ballot.waiting.update(asked)
        ballot.participants.update(work.sites)
        prepare = PrepareRoutingTx(tx=work.tx, kind=work.kind, epoch=self.epoch, number=number)
        return [*(SendOnLink(site, prepare) for site in asked), *self.count(work)]

    def on_voted(self, link: NodeId, voted: RoutingTxVoted) -> list[Effect]:
        """A site or a broker further down has voted."""
        work, ballot = self.works.get(voted.tx), self.ballots.get(voted.tx)
        if work is None or ballot is None or link not in ballot.waiting:
            return []
        ballot.waiting.discard(link)
        ballot.participants.update(voted.participants)
        ballot.reached.update(voted.reached)
        work.rejection = work.rejection or voted.rejection
        return self.count(work)

    def count(self, work: Work) -> list[Effect]:
        """Vote when everything is known; a rejection is known at once."""
        ballot = self.ballots.get(work.tx)
        if ballot is None or ballot.closed or (ballot.waiting and work.rejection is None):
            return []
        ballot.closed = True
        return self._send_vote(
            RoutingTxVoted(
                tx=work.tx,
                epoch=self.epoch,
                rejection=work.rejection,
                participants=tuple(sorted(ballot.participants)),
                reached=tuple(sorted(ballot.reached)),
            )
        )

    def _send_vote(self, voted: RoutingTxVoted) -> list[Effect]:
        return self._at_root(voted) if self.parent is None else [SendOnLink(self.parent, voted)]

    def site_lost(self, work: Work, site: NodeId, rejection: Rejection) -> list[Effect]:
        """A site that takes part has left: unless it has voted, the transaction can't commit."""
        ballot = self.ballots.get(work.tx)
        voted = ballot is not None and not {ITSELF, site} & ballot.waiting
        if site not in work.sites or voted:
            return []
        work.rejection = work.rejection or rejection
        return self.count(work)

    # ----------------------------------------------------------------------------------------------------- decisions

    def on_decided(self, decided: RoutingTxDecided) -> list[Effect]:
        """The coordinator's word, for everybody further down and for the sites here."""
        tx = decided.tx
        effects: list[Effect] = [SendOnLink(child, decided) for child in self.children]
        if tx in self.ended:
            return effects
        work = self.works.pop(tx, None) or Work(tx, TxKind.ISOLATED if decided.number else TxKind.DYNAMIC)
        return effects + self._settle(work, decided)

    def _settle(self, work: Work, decided: RoutingTxDecided) -> list[Effect]:
        tx = work.tx
        self.works.pop(tx, None)
        self.ballots.pop(tx, None)
        self.ended[tx] = decided.committed
        if len(self.ended) > ENDED_MAX:
            self.ended.popitem(last=False)
        initiator = self._initiator_here(tx)
        sites = sorted(work.sites | ({initiator} if initiator is not None else set()))
        # Tables first: a site that knows of the commit may rely on them with its next publication.
        effects = self.settlement.commit(work, decided.number) if decided.committed else self.settlement.abort(work)
        effects += [SendOnLink(site, decided) for site in sites]
        if decided.committed:
            self.applied[tx] = Applied(work, decided.number)
            effects += self._flip(tx)
        return effects

    # --------------------------------------------------------------------------------------------------------- flips

    def on_flip(self, link: NodeId, flip: Flip) -> list[Effect]:
        """Everything behind a link has applied a commit."""
        applied = self.applied.get(flip.tx)
        if applied is None or flip.epoch != self.epoch:
            return []
        applied.received.add(link)
        return self._flip(flip.tx)

    def _flip(self, tx: TxId) -> list[Effect]:
        applied = self.applied[tx]
        effects: list[Effect] = []
        for link in self.routes.neighbours:
            if link not in applied.sent and self._may_flip(applied, link):
                applied.sent.add(link)
                effects.append(SendOnLink(link, Flip(tx=tx, epoch=self.epoch)))
        if applied.received.issuperset(self.routes.neighbours):
            del self.applied[tx]
            effects += self.settlement.collapse(applied.work)
            if self.parent is None:
                effects += self._applied_everywhere(tx)
        return effects

    def _may_flip(self, applied: Applied, link: NodeId) -> bool:
        return applied.received.issuperset(n for n in self.routes.neighbours if n != link)

    # ---------------------------------------------------------------------------------------------------- a new epoch

    def on_domain(self, opened: DomainOpened) -> list[Effect]:
        """The coordinator began anew: what is not on its list of commits is aborted."""
        self.epoch = opened.epoch
        committed = dict(opened.committed)
        effects: list[Effect] = []
        for tx in sorted(self.applied.keys() - committed.keys()):
            effects += self.settlement.collapse(self.applied.pop(tx).work)
        for tx, number in sorted(committed.items(), key=lambda each: (each[1], each[0])):
            effects += self._apply_again(tx, number)
        for work in [self.works[tx] for tx in sorted(self.works)]:
            effects += self._settle(work, RoutingTxDecided(tx=work.tx, committed=False, rejection=RESTARTED))
        self.routes.number = max(self.routes.number, opened.number)
        return effects

    def _apply_again(self, tx: TxId, number: int) -> list[Effect]:
        """A commit that may not be applied everywhere: everybody says again when it is."""
        known = self.applied.get(tx)
        if known is not None:
            self.applied[tx] = Applied(known.work, number)
            return self._flip(tx)
        if self.ended.get(tx):
            self.applied[tx] = Applied(Work(tx, TxKind.DYNAMIC), number)  # nothing is left to collapse
            return self._flip(tx)
        work = self.works.get(tx) or Work(tx, TxKind.ISOLATED if number else TxKind.DYNAMIC)
        return self._settle(work, RoutingTxDecided(tx=tx, committed=True, number=number))
