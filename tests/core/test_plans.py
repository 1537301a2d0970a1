"""The log of a replica set takes transactions from clients only as the set's policy plans them."""

from msgspec.structs import replace

from tests.core.driven_rendezvous import ME, DrivenRendezvous, posts, standing_only
from tests.core.machines import of, persisted
from tops.constraints import AtLeast, OnlyFrom
from tops.core.epochs import EpochOptions
from tops.core.rendezvous import Rendezvous, RendezvousOptions
from tops.effects import Effect, Reject
from tops.ids import TxId
from tops.messages import (
    Address,
    CensusPolicy,
    Event,
    PrepareEpoch,
    RunOneShot,
    Sender,
    StandingWithdrawn,
    TxOutcome,
    TxSpec,
    TypeAdvertised,
    TypeAnswered,
)
from tops.records import LogAppended, PlansDeclared, TypeDefined
from tops.set_types import set_definition
from tops.transactions import LocalOutcome, Outcome, ScopeLimit, TxType

LOG = set_definition("rs.shop")
REPLICAS = frozenset({"shop/r1", "shop/r2"})
PLAN = standing_only(LOG.name, AtLeast(2, REPLICAS), OnlyFrom(REPLICAS))
WRITER, REPLICA = Sender("anna", "writer", incarnation=1), Sender("shop/r1", "replica", incarnation=1)
WEAKER = {
    "local": TxSpec(LOG.name, TxType.LOCAL, limit=ScopeLimit.LOCAL, census=None),
    "fewer votes": standing_only(LOG.name, AtLeast(1, REPLICAS), OnlyFrom(REPLICAS)),
    "other voters": standing_only(LOG.name, AtLeast(2, REPLICAS | {"mallory"}), OnlyFrom(REPLICAS | {"mallory"})),
    "no constraints": standing_only(LOG.name),
    "a census": replace(PLAN, census=CensusPolicy(1.0)),
    "decided early": replace(PLAN, decide_when_met=True),
    "hours to vote": replace(PLAN, vote_timeout_s=3600.0),
    "attributes": replace(PLAN, attributes={"at": 1}),
    "independent": replace(PLAN, local_outcome=LocalOutcome.INDEPENDENT, limit=ScopeLimit.DISTRIBUTED),
}


class Shop(DrivenRendezvous):
    """A set of two replicas that vote."""

    def __init__(self, plans: tuple[TxSpec, ...] | None = (PLAN,)) -> None:
        super().__init__()
        self.hear(TypeAdvertised(definitions=(LOG,), plans=plans), Address(ME, "r1", 1), REPLICA)
        for replica in ("r1", "r2"):
            self.stand(replica, LOG.name, f"shop/{replica}", position=0)

    def run_by(self, sender: Sender, spec: TxSpec, tx: str = "anna.1.1") -> list[Effect]:
        body = {"at": 0, "write": b"", "reads": b""}
        return self.hear(
            RunOneShot(tx=TxId(tx), spec=spec, events=(Event(LOG.name, body),)), Address(ME, "client", 1), sender
        )


def test_a_writers_transaction_as_planned_is_voted_on() -> None:
    shop = Shop()

    assert len(posts(shop.run_by(WRITER, PLAN), PrepareEpoch)) == 2


def test_a_writers_transaction_with_weaker_guarantees_is_aborted_audited_and_logged_nowhere() -> None:
    for name, spec in WEAKER.items():
        shop = Shop()

        effects = shop.run_by(WRITER, spec)

        (outcome,) = posts(effects, TxOutcome)
        assert outcome.outcome is Outcome.ABORTED, name
        assert outcome.reason.startswith("against-plan: "), name
        (rejected,) = of(effects, Reject)
        assert (rejected.sender, rejected.verb, rejected.event_type) == (WRITER, "run", LOG.name)
        assert not posts(effects, PrepareEpoch)
        assert not persisted(shop.effects, LogAppended), name


def test_where_replicas_commit_first_clients_run_no_transactions_at_all() -> None:
    shop = Shop(plans=())

    (outcome,) = posts(shop.run_by(WRITER, WEAKER["local"]), TxOutcome)

    assert outcome.reason.startswith("against-plan: ")
    assert not persisted(shop.effects, LogAppended)


def test_replicas_and_operators_are_not_bound_by_the_plans() -> None:
    shop = Shop(plans=())

    (by_replica,) = posts(shop.run_by(REPLICA, WEAKER["local"], "shop/r1.1.1"), TxOutcome)
    (by_operator,) = posts(shop.run_by(WRITER, replace(WEAKER["local"], operator=True)), TxOutcome)

    assert by_replica.outcome is by_operator.outcome is Outcome.COMMITTED


def test_a_replica_of_another_set_is_bound_by_them() -> None:
    (outcome,) = posts(Shop().run_by(Sender("stock/r1", "replica"), WEAKER["local"], "stock/r1.1.1"), TxOutcome)

    assert outcome.reason.startswith("against-plan: ")


def test_before_a_replica_has_declared_plans_clients_run_nothing() -> None:
    (outcome,) = posts(Shop(plans=None).run_by(WRITER, PLAN), TxOutcome)

    assert outcome.reason.startswith("plan-unknown: ")


def test_who_advertises_the_log_without_plans_leaves_them_as_they_are() -> None:
    shop = Shop()

    effects = shop.hear(TypeAdvertised(definitions=(LOG,)), Address(ME, "client", 1), WRITER)

    assert posts(effects, TypeAnswered)[0].refusal is None
    assert not persisted(effects, PlansDeclared)
    assert posts(shop.run_by(WRITER, PLAN), PrepareEpoch)


def test_plans_are_on_disk_before_the_replica_is_told_that_they_count_and_survive_a_restart() -> None:
    shop = Shop()
    declared = persisted(shop.effects, PlansDeclared)
    assert declared == [PlansDeclared(event_type=LOG.name, plans=(PLAN,))]

    again = Rendezvous(ME, 2, {}, RendezvousOptions(epochs=EpochOptions()), bytes)
    for record in (TypeDefined(event_type=LOG), *declared):
        again.recover(record)

    assert again.known.against_plan(WEAKER["local"], WRITER) is not None
    assert again.known.against_plan(PLAN, WRITER) is None


def test_a_changed_policy_replaces_the_plans() -> None:
    shop = Shop()
    shop.hear(TypeAdvertised(definitions=(LOG,), plans=(WEAKER["fewer votes"],)), Address(ME, "r1", 1), REPLICA)

    (outcome,) = posts(shop.run_by(WRITER, PLAN), TxOutcome)

    assert outcome.reason.startswith("against-plan: ")
    assert posts(shop.run_by(WRITER, WEAKER["fewer votes"], "anna.1.2"), PrepareEpoch)


def declare(shop: Shop, replica: str, *plans: TxSpec) -> list[Effect]:
    advertised = TypeAdvertised(definitions=(LOG,), plans=plans)
    return shop.hear(advertised, Address(ME, replica, 1), Sender(f"shop/{replica}", "replica", incarnation=1))


def test_a_replica_that_the_plans_do_not_name_declares_none() -> None:
    """Its certificate is valid, and it is not in the set's list: clients would be kept from writing."""
    shop = Shop()

    effects = declare(shop, "r9")

    assert [e.sender.identity for e in of(effects, Reject)] == ["shop/r9"]
    assert not persisted(effects, PlansDeclared)
    assert posts(effects, TypeAnswered)[0].refusal is None
    assert posts(shop.run_by(WRITER, PLAN), PrepareEpoch)


def test_a_replica_that_is_added_declares_plans_once_another_one_has_named_it() -> None:
    three = REPLICAS | {"shop/r3"}
    grown = standing_only(LOG.name, AtLeast(3, three), OnlyFrom(three))
    shop = Shop()

    assert not persisted(declare(shop, "r3", grown), PlansDeclared)
    assert persisted(declare(shop, "r2", grown), PlansDeclared)
    assert persisted(declare(shop, "r3", PLAN), PlansDeclared)


def test_replicas_that_replace_all_others_declare_plans_when_those_are_gone() -> None:
    shop = Shop()
    for replica in ("r1", "r2"):
        withdrawn = StandingWithdrawn(voter=replica, event_type=LOG.name)
        shop.hear(withdrawn, Address(ME, replica, 1), Sender(f"shop/{replica}", "replica", incarnation=1))

    assert persisted(declare(shop, "r9", WEAKER["fewer votes"]), PlansDeclared)
    assert persisted(declare(shop, "r1", PLAN), PlansDeclared), "a replica that was named before can't return"


def test_a_replica_that_the_plans_do_not_name_is_bound_by_them() -> None:
    """What it logs past them could be something that no replica can apply."""
    outsider, weaker = Sender("shop/r9", "replica", incarnation=1), WEAKER["no constraints"]

    (outcome,) = posts(Shop().run_by(outsider, weaker, "shop/r9.1.1"), TxOutcome)

    assert outcome.reason.startswith("against-plan: ")
    assert posts(Shop().run_by(REPLICA, weaker, "shop/r1.1.1"), PrepareEpoch)
