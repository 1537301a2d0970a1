"""The edge of the overlay: the state that a broker keeps for the sites that are connected to it.

It has each site's subscriptions and the stamp that all its messages get, and it protects private transactions: events
of a transaction reach only sites that have chosen to take part, and are withheld until they have chosen.

Other nodes reach a site by its handle: a pseudonym that this broker makes with a secret of its own, so that a handle
reveals nothing to other sites, and no site can claim the handle of another.
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
    StandingRegistered,
    SubscriptionChanged,
    TxBegan,
    TxPublication,
    TxSpec,
)

WITHHELD_MAX = 10_000
TRANSACTIONS_MAX = 10_000  # open ones of a site; the oldest is evicted, since its end may be lost with a broker
NONE, DISTRIBUTED = Scope.NONE, Scope.DISTRIBUTED  # read with every message


class Taken(msgspec.Struct):
    """What a site takes of one transaction; `scope` None until it has chosen.

    `pending` is how many of its subscriptions choose. With a single one the reply to the census contains the choice.
    """

    scope: Scope | None = None
    pending: int = 0
    distributed: bool = False
    pseudonyms: set[str] = set()
    withheld: list[Publication] = []
    ended: bool = False  # the transaction has ended; kept until the site has chosen and got what was withheld

    def choose(self, scope: Scope, distributed: bool) -> list[Publication]:
        """The site has chosen; returns what was withheld from it and is to be sent now."""
        self.scope, self.distributed = scope, self.distributed or distributed
        withheld, self.withheld = self.withheld, []
        return withheld if self.takes_any() else []

    def takes_any(self) -> bool:
        return self.distributed or (self.scope is not None and self.scope is not NONE)


class SiteLink(msgspec.Struct):
    """A site that is connected here."""

    name: NodeId
    sender: Sender  # the stamp of every message of the site
    address: Address
    subscriptions: dict[int, SubscriptionChanged] = {}
    filter_bytes: dict[int, int] = {}  # of these subscriptions
    secrets: dict[int, bytes] = {}  # of standing registrations, by subscription: they give the pseudonyms
    contacts: set[NodeId] = set()  # rendezvous brokers that it sent to: they are notified when it is lost
    transactions: OrderedDict[TxId, Taken] = msgspec.field(default_factory=OrderedDict)
    own_transactions: str = ""  # the prefix of the ids of this incarnation's transactions

    def __post_init__(self) -> None:
        self.own_transactions = tx_id(self.name, self.sender.incarnation, 0).removesuffix("0")

    @property
    def incarnation(self) -> int:
        return self.sender.incarnation

    def begins(self, tx: TxId) -> bool:
        """Whether this incarnation of the site may begin a transaction with that id."""
        return tx.startswith(self.own_transactions)

    def origin(self, claimed: Origin) -> Origin:
        """The origin of a publication; of the site's own claim only the number counts."""
        return Origin(claimed.family, claimed.number, self.address.handle, self.sender.incarnation)


class Held(msgspec.Struct):
    """The subscriptions of all sites of one identity here."""

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
        """A site is connected, for the first time or again."""
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
        """Whether one more subscription exceeds the quota of this site's identity."""
        if subscription in site.subscriptions:
            return False
        return self._held_by(site).subscriptions >= quota

    def is_beyond_bytes(self, quota: int, site: SiteLink, changed: SubscriptionChanged) -> bool:
        """Whether the filters of this site's identity, including this one, exceed the quota together."""
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
        """Add or end a subscription; returns the route of the former one, which is to be removed."""
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
        """Whether a transaction's publication goes to this site now; it is withheld if the site has not chosen yet."""
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
            return known.scope is not NONE  # a purely distributed participant waits for a prepare
        if type(publication) is TxBegan and known.distributed and known.pseudonyms:
            # A site whose reply was rejected must get no further events, unless it takes part in another way.
            known.distributed = not publication.members.isdisjoint(map(hashed, known.pseudonyms))
            return True
        return known.distributed or known.takes_any()

    def _announce(self, site: SiteLink, tx: TxId, spec: TxSpec, types: tuple[str, ...]) -> bool:
        """Whether a new transaction is announced to the site: it takes part, or has to choose whether it does."""
        taken = self._standing(site, tx, spec, types)
        if taken.scope is not None and not taken.takes_any():
            return False
        site.transactions[tx] = taken
        if len(site.transactions) > TRANSACTIONS_MAX:
            site.transactions.popitem(last=False)
        return True

    def chosen(self, site: SiteLink, choice: ScopeChosen) -> list[Publication]:
        """The site has chosen; returns what was withheld from it and is to be sent now."""
        taken = site.transactions.get(choice.tx)
        if taken is None:
            return []
        withheld = taken.choose(choice.scope, choice.distributed)
        if taken.ended or not taken.takes_any():
            del site.transactions[choice.tx]
        return withheld

    def on_replied(self, site: SiteLink, tx: TxId, pseudonym: str) -> list[Publication]:
        """The site replies to the census; returns what was withheld from it and is to be sent now."""
        taken = site.transactions.get(tx)
        if taken is None:
            return []
        taken.pseudonyms.add(pseudonym)
        return taken.choose(NONE, True) if taken.pending == 1 else []

    def on_standing(self, site: SiteLink, registered: StandingRegistered) -> None:
        """A standing registration under way to the coordinator; its secret gives the pseudonyms in lists of members."""
        if registered.subscription in site.subscriptions:
            site.secrets[registered.subscription] = registered.secret

    def dropped_out(self, site: SiteLink, tx: TxId) -> None:
        """The site's distributed part has ended; what it takes in another way continues."""
        taken = site.transactions.get(tx)
        if taken is not None and taken.scope is not None:
            taken.distributed = False
            if not taken.takes_any():
                del site.transactions[tx]

    def end(self, tx: TxId, links: Iterable[NodeId]) -> None:
        """The last publication of a transaction has passed; `links` are where it was announced."""
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
        """What the site takes by its registrations; `scope` is None if one of its subscriptions chooses."""
        taken = Taken(NONE)
        for number, s in site.subscriptions.items():
            if s.definitions[-1].name not in types or s.filter is None or not s.filter.matches(spec.attributes):
                continue
            if s.durable and s.scope is not DISTRIBUTED:
                continue  # it gets the transaction from the log
            if s.scope is None:
                taken.scope = None
                taken.pending += 1
                continue
            granted = granted_scope(s.scope, spec.limit, spec.tx_type)
            if granted is DISTRIBUTED:
                taken.distributed |= spec.census is not None  # it gets a one-shot with the prepare
                if taken.distributed and number in site.secrets:
                    taken.pseudonyms.add(standing_pseudonym(site.secrets[number], tx))
            elif taken.scope is not None:
                taken.scope = max(taken.scope, granted)
        return taken


def _named(changed: SubscriptionChanged) -> SubscriptionChanged:
    """The subscription with only those parts of its definitions that are read here: the names of family and type."""
    family, own = changed.definitions[0].name, changed.definitions[-1].name
    return msgspec.structs.replace(changed, definitions=(EventType(family), EventType(own)))
