"""The log of a replica set takes transactions from clients only as the set's policy plans them."""

import pytest
from msgspec.structs import replace

from tests.core.driven_rendezvous import ME, DrivenRendezvous, sent_effects, standing_only
from tests.core.machines import of, persisted
from tops.core.commit.epochs import EpochOptions
from tops.core.coordinator.rendezvous import Rendezvous, RendezvousOptions
from tops.model.constraints import AtLeast, OnlyFrom
from tops.model.filters import Filter
from tops.model.ids import TxId
from tops.model.log_points import LogPoint
from tops.model.transactions import LocalOutcome, Outcome, ScopeLimit, TxType
from tops.protocol.effects import Effect, Reject
from tops.protocol.messages import (
    Address,
    AdvertisementHandled,
    CensusPolicy,
    Event,
    FollowLog,
    HistoryDiffers,
    PrepareEpoch,
    Principal,
    RunOneShot,
    Sender,
    StandingAccepted,
    StandingWithdrawn,
    TxOutcome,
    TxSpec,
    TypeAdvertised,
)
from tops.protocol.records import AnyRecord, LogAppended, MembersDeclared, PlansDeclared, TypeDefined
from tops.protocol.set_types import set_definition

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
        self.deliver(TypeAdvertised(definitions=(LOG,), plans=plans), Address(ME, "r1", 1), REPLICA)
        for replica in ("r1", "r2"):
            self.stand(replica, LOG.name, f"shop/{replica}", position=0)

    def run_by(self, sender: Sender, spec: TxSpec, tx: str = "anna.1.1") -> list[Effect]:
        body = {"at": 0, "write": b"", "reads": b""}
        return self.deliver(
            RunOneShot(tx=TxId(tx), spec=spec, events=(Event(LOG.name, body),)), Address(ME, "client", 1), sender
        )


def test_a_writers_transaction_as_planned_is_voted_on() -> None:
    shop = Shop()

    assert len(sent_effects(shop.run_by(WRITER, PLAN), PrepareEpoch)) == 2


def test_a_writers_transaction_with_weaker_guarantees_is_aborted_audited_and_logged_nowhere() -> None:
    for name, spec in WEAKER.items():
        shop = Shop()

        effects = shop.run_by(WRITER, spec)

        (outcome,) = sent_effects(effects, TxOutcome)
        assert outcome.outcome is Outcome.ABORTED, name
        assert outcome.reason.startswith("against-plan: "), name
        (rejected,) = of(effects, Reject)
        assert (rejected.sender, rejected.verb, rejected.event_type) == (WRITER, "run", LOG.name)
        assert not sent_effects(effects, PrepareEpoch)
        assert not persisted(shop.effects, LogAppended), name


def test_where_replicas_commit_first_clients_run_no_transactions_at_all() -> None:
    shop = Shop(plans=())

    (outcome,) = sent_effects(shop.run_by(WRITER, WEAKER["local"]), TxOutcome)

    assert outcome.reason.startswith("against-plan: ")
    assert not persisted(shop.effects, LogAppended)


def test_replicas_and_operators_are_not_bound_by_the_plans() -> None:
    shop = Shop(plans=())

    (by_replica,) = sent_effects(shop.run_by(REPLICA, WEAKER["local"], "shop/r1.1.1"), TxOutcome)
    (by_operator,) = sent_effects(shop.run_by(WRITER, replace(WEAKER["local"], operator=True)), TxOutcome)

    assert by_replica.outcome is by_operator.outcome is Outcome.COMMITTED


def test_a_replica_of_another_set_is_bound_by_them() -> None:
    (outcome,) = sent_effects(Shop().run_by(Sender("stock/r1", "replica"), WEAKER["local"], "stock/r1.1.1"), TxOutcome)

    assert outcome.reason.startswith("against-plan: ")


def test_before_a_replica_has_declared_plans_clients_run_nothing() -> None:
    (outcome,) = sent_effects(Shop(plans=None).run_by(WRITER, PLAN), TxOutcome)

    assert outcome.reason.startswith("plan-unknown: ")


def test_who_advertises_the_log_without_plans_leaves_them_as_they_are() -> None:
    shop = Shop()

    effects = shop.deliver(TypeAdvertised(definitions=(LOG,)), Address(ME, "client", 1), WRITER)

    assert sent_effects(effects, AdvertisementHandled)[0].rejection is None
    assert not persisted(effects, PlansDeclared)
    assert sent_effects(shop.run_by(WRITER, PLAN), PrepareEpoch)


def test_plans_are_on_disk_before_the_replica_is_told_that_they_count_and_survive_a_restart() -> None:
    shop = Shop()
    declared = persisted(shop.effects, PlansDeclared)
    assert declared == [PlansDeclared(event_type=LOG.name, plans=(PLAN,))]

    again = Rendezvous(ME, 2, {}, RendezvousOptions(epochs=EpochOptions()), bytes)
    records: list[AnyRecord] = [TypeDefined(event_type=LOG), *declared]
    for record in records:
        again.recover(record)

    assert again.known.against_plan(WEAKER["local"], WRITER) is not None
    assert again.known.against_plan(PLAN, WRITER) is None


def test_a_changed_policy_replaces_the_plans() -> None:
    shop = Shop()
    shop.deliver(TypeAdvertised(definitions=(LOG,), plans=(WEAKER["fewer votes"],)), Address(ME, "r1", 1), REPLICA)

    (outcome,) = sent_effects(shop.run_by(WRITER, PLAN), TxOutcome)

    assert outcome.reason.startswith("against-plan: ")
    assert sent_effects(shop.run_by(WRITER, WEAKER["fewer votes"], "anna.1.2"), PrepareEpoch)


def declare(shop: Shop, replica: str, *plans: TxSpec, members: frozenset[str] | None = None) -> list[Effect]:
    advertised = TypeAdvertised(definitions=(LOG,), plans=plans, members=members)
    return shop.deliver(advertised, Address(ME, replica, 1), Sender(f"shop/{replica}", "replica", incarnation=1))


def test_a_replica_that_the_plans_do_not_name_declares_none() -> None:
    """Its certificate is valid, and it is not in the set's list: clients would be kept from writing."""
    shop = Shop()

    effects = declare(shop, "r9")

    assert [e.sender.identity for e in of(effects, Reject)] == ["shop/r9"]
    assert not persisted(effects, PlansDeclared)
    assert sent_effects(effects, AdvertisementHandled)[0].rejection is None
    assert sent_effects(shop.run_by(WRITER, PLAN), PrepareEpoch)


def test_a_replica_that_is_added_declares_plans_once_another_one_has_named_it() -> None:
    three = REPLICAS | {"shop/r3"}
    grown = standing_only(LOG.name, AtLeast(3, three), OnlyFrom(three))
    shop = Shop()

    assert not persisted(declare(shop, "r3", grown), PlansDeclared)
    assert persisted(declare(shop, "r2", grown), PlansDeclared)
    assert persisted(declare(shop, "r3", PLAN), PlansDeclared)


def test_replicas_that_replace_all_others_wait_for_an_administrator_also_while_those_are_gone() -> None:
    """A key that was not revoked must not take the set over while its replicas are stopped."""
    shop, admin = Shop(), Sender("root", "admin", incarnation=1)
    for replica in ("r1", "r2"):
        withdrawn = StandingWithdrawn(voter=replica, event_type=LOG.name)
        shop.deliver(withdrawn, Address(ME, replica, 1), Sender(f"shop/{replica}", "replica", incarnation=1))

    assert not persisted(declare(shop, "r9", WEAKER["fewer votes"]), PlansDeclared)
    listed = TypeAdvertised(definitions=(LOG,), members=frozenset({"shop/r9"}))
    assert persisted(shop.deliver(listed, Address(ME, "root", 1), admin), MembersDeclared)
    assert persisted(declare(shop, "r9", WEAKER["fewer votes"]), PlansDeclared)
    assert not persisted(declare(shop, "r1", PLAN), PlansDeclared), "it is no longer in the list"


OUTSIDER = Sender("shop/r9", "replica", incarnation=1)
FOR_OUTSIDER = Sender("web", "service", incarnation=1, on_behalf_of=Principal("shop/r9", "replica"))


@pytest.mark.parametrize("sender", [OUTSIDER, FOR_OUTSIDER], ids=["by itself", "through a service"])
@pytest.mark.parametrize("spec", [WEAKER["no constraints"], PLAN, replace(WEAKER["local"], operator=True)])
def test_a_replica_outside_the_list_runs_nothing(spec: TxSpec, sender: Sender) -> None:
    """What it logs could be something that no replica can apply."""
    shop = Shop()

    (outcome,) = sent_effects(shop.run_by(sender, spec, f"{sender.node}.1.1"), TxOutcome)

    assert outcome.reason.startswith("not-listed: ")
    assert not persisted(shop.effects, LogAppended)
    assert sent_effects(Shop().run_by(REPLICA, WEAKER["no constraints"], "shop/r1.1.1"), PrepareEpoch)


def unplanned_shop() -> Shop:
    """A policy without votes: no plan names the replicas, their list alone does."""
    shop = Shop(plans=())
    assert persisted(declare(shop, "r1", members=REPLICAS), MembersDeclared)
    return shop


def test_the_list_holds_where_plans_name_nobody_and_survives_a_restart() -> None:
    shop = unplanned_shop()
    again = Rendezvous(ME, 2, {}, RendezvousOptions(epochs=EpochOptions()), bytes)
    records: list[AnyRecord] = [*persisted(shop.effects, PlansDeclared), *persisted(shop.effects, MembersDeclared)]
    for record in (TypeDefined(event_type=LOG), *records):
        again.recover(record)

    for rendezvous in (shop.core, again):
        assert rendezvous.known.unlisted(LOG.name, OUTSIDER) is not None
        assert rendezvous.known.unlisted(LOG.name, REPLICA) is None


def test_a_replica_that_leaves_the_list_has_no_part_from_then_on() -> None:
    shop = unplanned_shop()
    assert persisted(declare(shop, "r2", members=frozenset({"shop/r1", "shop/r3"})), MembersDeclared)

    r2, r3 = (Sender(f"shop/{name}", "replica", incarnation=1) for name in ("r2", "r3"))
    (rejected,) = sent_effects(shop.run_by(r2, WEAKER["local"], "shop/r2.1.1"), TxOutcome)
    (taken,) = sent_effects(shop.run_by(r3, WEAKER["local"], "shop/r3.1.1"), TxOutcome)

    assert rejected.reason.startswith("not-listed: ")
    assert taken.outcome is Outcome.COMMITTED


def test_a_replica_outside_the_list_registers_when_it_has_been_added() -> None:
    shop = unplanned_shop()
    registered = shop.stand("r3", LOG.name, "shop/r3", position=0)
    assert [e.code for e in of(registered, Reject)] == ["not-listed"]
    assert not sent_effects(registered, StandingAccepted)

    declare(shop, "r1", members=REPLICAS | {"shop/r3"})

    assert sent_effects(shop.stand("r3", LOG.name, "shop/r3", position=0), StandingAccepted)


def test_a_replica_outside_the_list_that_claims_to_be_ahead_does_not_close_the_log() -> None:
    shop = unplanned_shop()
    log = shop.core.logs[LOG.name]
    ahead = FollowLog(
        name="shop/r9",
        definitions=(LOG,),
        filter=Filter.everything(),
        position=99,
        start="now",
        credit=1,
        voter=None,
        history=log.chain.history,
        digest="e" * 32,
    )

    shop.deliver(ahead, Address(ME, "r9", 1), OUTSIDER)
    effects = shop.deliver(
        HistoryDiffers(name="shop/r9", event_type=LOG.name, point=LogPoint("h", 1, "e" * 32)),
        Address(ME, "r9", 1),
        OUTSIDER,
    )

    assert (log.opening, log.stale) == (None, None)
    assert [e.sender for e in of(effects, Reject)] == [OUTSIDER]
    shop.deliver(ahead, Address(ME, "r1", 1), REPLICA)
    assert log.stale is not None, "a member's word counts"
