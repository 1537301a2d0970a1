"""The edge of the overlay: what a broker keeps for the sites that are connected to it.

It knows each site's subscriptions and the stamp that all its messages get, and it is the guard of private transactions:
events of a transaction reach only sites that have chosen to take them, and are held back until they have.

Other nodes reach a site by its handle: a pseudonym that this broker makes with a secret of its own, so that a handle
tells other sites nothing, and no site can claim another's.
"""

import hmac
from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from tops.model.event_types import EventType
from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId, hashed, standing_pseudonym, tx_id
from tops.model.transactions import Scope, granted_scope
from tops.protocol.messages import (
    Address,
    CensusOpened,
    LocalCommitOrdered,
    Origin,
    Publication,
    ScopeChosen,
    Sender,
    StandingAnswered,
    SubscriptionChanged,
    TxBegan,
    TxPublication,
    TxSpec,
)

WITHHELD_MAX = 10_000
TRANSACTIONS_MAX = 10_000  # a site's open ones; whose end was lost with a broker makes room for newer ones
NONE, DISTRIBUTED = Scope.NONE, Scope.DISTRIBUTED  # looked at with every message


class Taken(msgspec.Struct):
    """What a site takes of one transaction; `scope` None until it has said so.

    `asked` is how many of its subscriptions choose. With a single one a reply to the census says it all.
    """

    scope: Scope | None = None
    asked: int = 0
    distributed: bool = False
    pseudonyms: set[str] = set()
    withheld: list[Publication] = []
    ended: bool = False  # the transaction is over; kept until the site has chosen and got what was held back

    def choose(self, scope: Scope, distributed: bool) -> list[Publication]:
        """It is known what the site takes; returns what was held back for it."""
        self.scope, self.distributed = scope, self.distributed or distributed
        withheld, self.withheld = self.withheld, []
        return withheld if self.takes_any() else []

    def takes_any(self) -> bool:
        return self.distributed or (self.scope is not None and self.scope is not NONE)


class SiteLink(msgspec.Struct):
    """A site that is connected here."""

    name: NodeId
    sender: Sender  # what every message of the site is stamped with
    address: Address
    subscriptions: dict[int, SubscriptionChanged] = {}
    filter_bytes: dict[int, int] = {}  # of these subscriptions
    secrets: dict[int, bytes] = {}  # of standing answers, by subscription: they tell who was turned away
    contacts: set[NodeId] = set()  # rendezvous brokers that it wrote to: they are told when it is gone
    transactions: OrderedDict[TxId, Taken] = msgspec.field(default_factory=OrderedDict)
    own_transactions: str = ""  # how the ids of transactions begin that this life of the site begins

    def __post_init__(self) -> None:
        self.own_transactions = tx_id(self.name, self.sender.incarnation, 0).removesuffix("0")

    @property
    def incarnation(self) -> int:
        return self.sender.incarnation

    def begins(self, tx: TxId) -> bool:
        """Whether a transaction of that id is one that this incarnation of the site may begin."""
        return tx.startswith(self.own_transactions)

    def origin(self, claimed: Origin) -> Origin:
        """Which of the site's publications; of what it says only the number counts."""
        return Origin(claimed.family, claimed.number, self.address.handle, self.sender.incarnation)


class Held(msgspec.Struct):
    """What all sites of one identity have subscribed to here."""

    subscriptions: int = 0
    filter_bytes: int = 0


class Edge:
    """The sites of one broker."""

    def __init__(self, broker: NodeId, secret: bytes) -> None:
        self.broker, self._secret = broker, secret
        self.sites: dict[NodeId, SiteLink] = {}
        self.owners: dict[str, SiteLink] = {}  # by handle
        self._held: dict[str, Held] = {}  # by the identity that is accountable

    def connect(self, sender: Sender) -> None:
        """A site is there, for the first time or again."""
        name = sender.node
        known = self.sites.get(name)
        if known is None or known.incarnation != sender.incarnation:
            self.forget(name)
            handle = hmac.digest(self._secret, f"{name} {sender.incarnation}".encode(), "sha256")[:16].hex()
            address = Address(self.broker, handle, sender.incarnation)
            self.sites[name] = self.owners[handle] = SiteLink(name, sender, address)

    def forget(self, name: NodeId) -> SiteLink | None:
        site = self.sites.pop(name, None)
        if site is not None:
            del self.owners[site.address.handle]
            self._count(site, -len(site.subscriptions), -sum(site.filter_bytes.values()))
        return site

    def is_beyond(self, quota: int, site: SiteLink, subscription: int) -> bool:
        """Whether one more subscription of this site's identity is too many."""
        if subscription in site.subscriptions:
            return False
        return self._held_by(site).subscriptions >= quota

    def is_beyond_bytes(self, quota: int, site: SiteLink, changed: SubscriptionChanged) -> bool:
        """Whether the filters of this site's identity, this one among them, are too large together."""
        size = 0 if changed.filter is None else changed.filter.encoded_bytes()
        if not size:
            return False
        return self._held_by(site).filter_bytes - site.filter_bytes.get(changed.subscription, 0) + size > quota

    def _held_by(self, site: SiteLink) -> Held:
        return self._held.get(site.sender.accountable, Held())

    def _count(self, site: SiteLink, subscriptions: int, filter_bytes: int) -> None:
        held = self._held.setdefault(site.sender.accountable, Held())
        held.subscriptions += subscriptions
        held.filter_bytes += filter_bytes
        if not held.subscriptions:
            del self._held[site.sender.accountable]

    def subscribe(self, site: SiteLink, changed: SubscriptionChanged) -> tuple[str, Filter] | None:
        """Keep or end a subscription; returns the former one's route, which is to be removed."""
        former = site.subscriptions.pop(changed.subscription, None)
        site.secrets.pop(changed.subscription, None)
        former_bytes = site.filter_bytes.pop(changed.subscription, 0)
        if former is not None:
            self._count(site, -1, -former_bytes)
        if changed.filter is not None:
            size = changed.filter.encoded_bytes()
            site.subscriptions[changed.subscription], site.filter_bytes[changed.subscription] = _named(changed), size
            self._count(site, 1, size)
        if former is None or former.filter is None or former.durable:
            return None
        return former.definitions[-1].name, former.filter

    def subscribers_of(self, family: str) -> list[NodeId]:
        return [
            s.name
            for s in self.sites.values()
            if any(c.definitions[0].name == family for c in s.subscriptions.values())
        ]

    # --------------------------------------------------------------------------------------------- transactions

    def pass_on(self, site: SiteLink, tx: TxId, publication: TxPublication, types: tuple[str, ...]) -> bool:
        """Whether a transaction's publication goes to this site now; if the site has not chosen yet it is kept."""
        if type(publication) is CensusOpened:
            return self._announce(site, tx, publication.spec, types)
        known = site.transactions.get(tx)
        if known is None:
            return False
        if known.scope is None:
            if len(known.withheld) < WITHHELD_MAX:
                known.withheld.append(publication)
            return False
        if type(publication) is LocalCommitOrdered:
            return known.scope is not NONE  # whoever is only a distributed participant waits for a prepare
        if type(publication) is TxBegan and known.distributed and known.pseudonyms:
            # Turned away at the census: from here on it is a stranger, unless it takes the events in another way.
            known.distributed = not publication.members.isdisjoint(map(hashed, known.pseudonyms))
            return True
        return known.distributed or known.takes_any()

    def _announce(self, site: SiteLink, tx: TxId, spec: TxSpec, types: tuple[str, ...]) -> bool:
        """Whether the site is told of a new transaction: it takes part, or has to say whether it does."""
        taken = self._standing(site, tx, spec, types)
        if taken.scope is not None and not taken.takes_any():
            return False
        site.transactions[tx] = taken
        if len(site.transactions) > TRANSACTIONS_MAX:
            site.transactions.popitem(last=False)
        return True

    def chosen(self, site: SiteLink, choice: ScopeChosen) -> list[Publication]:
        """The site has said what it takes; returns what was held back for it."""
        taken = site.transactions.get(choice.tx)
        if taken is None:
            return []
        withheld = taken.choose(choice.scope, choice.distributed)
        if taken.ended or not taken.takes_any():
            del site.transactions[choice.tx]
        return withheld

    def on_replied(self, site: SiteLink, tx: TxId, pseudonym: str) -> list[Publication]:
        """The site asks to be a distributed participant; returns what was held back for it."""
        taken = site.transactions.get(tx)
        if taken is None:
            return []
        taken.pseudonyms.add(pseudonym)
        return taken.choose(NONE, True) if taken.asked == 1 else []

    def on_standing(self, site: SiteLink, answered: StandingAnswered) -> None:
        """A standing answer on its way to the coordinator; its pseudonyms will be on the lists of members, or not."""
        if answered.subscription in site.subscriptions:
            site.secrets[answered.subscription] = answered.secret

    def dropped_out(self, site: SiteLink, tx: TxId) -> None:
        """The site's distributed part is over; what it takes in another way goes on."""
        taken = site.transactions.get(tx)
        if taken is not None and taken.scope is not None:
            taken.distributed = False
            if not taken.takes_any():
                del site.transactions[tx]

    def end(self, tx: TxId, links: Iterable[NodeId]) -> None:
        """The last publication of a transaction has passed; `links` are those where it was announced."""
        for link in links:
            site = self.sites.get(link)
            taken = site.transactions.get(tx) if site is not None else None
            if site is None or taken is None:
                continue
            if taken.scope is not None:
                del site.transactions[tx]
            else:
                taken.ended = True

    def _standing(self, site: SiteLink, tx: TxId, spec: TxSpec, types: tuple[str, ...]) -> Taken:
        """What the site takes without being asked, or an open question."""
        taken = Taken(NONE)
        for number, s in site.subscriptions.items():
            if s.definitions[-1].name not in types or s.filter is None or not s.filter.matches(spec.attributes):
                continue
            if s.durable and s.scope is not DISTRIBUTED:
                continue  # it takes the transaction from the log
            if s.scope is None:
                taken.scope = None
                taken.asked += 1
                continue
            granted = granted_scope(s.scope, spec.limit, spec.tx_type)
            if granted is DISTRIBUTED:
                taken.distributed |= spec.census is not None  # a one-shot reaches it with the prepare
                if taken.distributed and number in site.secrets:
                    taken.pseudonyms.add(standing_pseudonym(site.secrets[number], tx))
            elif taken.scope is not None:
                taken.scope = max(taken.scope, granted)
        return taken


def _named(changed: SubscriptionChanged) -> SubscriptionChanged:
    """The subscription with no more of its type's definitions than is looked at here: the family's name and its own."""
    family, own = changed.definitions[0].name, changed.definitions[-1].name
    return msgspec.structs.replace(changed, definitions=(EventType(family), EventType(own)))
