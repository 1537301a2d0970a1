"""Registers, renews and withdraws standing registrations, and decides which replicas are in sync."""

from collections.abc import Callable

from tops.core.commit.epochs import EpochCoordinator
from tops.core.commit.standing_registrations import StandingRegistration, StandingRegistrations
from tops.core.coordinator.known_types import NOT_LISTED, KnownTypes
from tops.core.coordinator.log_opening import LogOpenings
from tops.core.coordinator.open_transactions import RendezvousNode
from tops.model.ids import voter_key
from tops.model.log_points import LogPoint
from tops.model.transactions import Scope
from tops.protocol.effects import Effect, Persist, Reject, SendTo, SetTimer
from tops.protocol.messages import Address, Sender, StandingAccepted, StandingRegistered, StandingWithdrawn
from tops.protocol.records import InSyncChanged

Lose = Callable[[tuple[str, ...], str], list[Effect]]


class RegistrationHandler:
    """The standing registrations of all families; `lose` ends what depended on one that is withdrawn or expired."""

    def __init__(self, node: RendezvousNode, known: KnownTypes, openings: LogOpenings, lose: Lose) -> None:
        self._node, self._known, self._openings, self._lose = node, known, openings, lose

    def on_registered(self, m: StandingRegistered, sender: Sender, at: Address, now: float) -> list[Effect]:
        family = self._known.families.get(m.event_type)
        if family is None:
            return []
        epochs = self._known.epochs[family]
        standing = epochs.standing
        if (rejection := self._rejection(family, standing, m, sender)) is not None:
            return [rejection]
        registration, new = standing.renew(m, sender, at, now)
        effects = self._judge_position(epochs, registration, new)
        in_sync = standing.counted(registration)
        accepted = StandingAccepted(voter=m.voter, incarnation=self._node.incarnation, in_sync=in_sync)
        effects.append(SendTo(at, accepted))
        if new:
            if len(standing.registrations) == 1:  # a later one must not postpone the check of the earlier ones
                effects.append(SetTimer(("lease", family), self._node.options.lease_s))
            effects += epochs.start()
        return effects

    def _judge_position(self, epochs: EpochCoordinator, registration: StandingRegistration, new: bool) -> list[Effect]:
        """Update the in-sync set. A replica is in sync only if it has applied everything decided; it joins the set only
        while no epoch is in flight, since its vote on that epoch was not requested."""
        log, identity = epochs.log, registration.identity
        if log is None or registration.position is None or registration.scope is not Scope.DISTRIBUTED:
            return []
        if log.opening is not None or identity in log.unconfirmed:
            return []  # the end of the log, or what this replica committed while it was silent, is not known yet
        fits, problem = self._openings.judge(
            log, identity, LogPoint(registration.history, registration.position, registration.digest)
        )
        if not fits:
            return problem
        in_sync = epochs.standing.in_sync
        if identity in in_sync and new and registration.position < log.decided_upto:
            in_sync = in_sync - {identity}
        elif identity not in in_sync and registration.position >= log.decided_upto and not epochs.in_flight:
            in_sync = in_sync | {identity}
        if in_sync == epochs.standing.in_sync:
            return []
        epochs.standing.in_sync = in_sync
        return [Persist(InSyncChanged(event_type=log.event_type, in_sync=in_sync))]

    def _rejection(
        self, family: str, standing: StandingRegistrations, m: StandingRegistered, sender: Sender
    ) -> Reject | None:
        """Why this registration is not accepted, or None: only its replicas take part in a set's log, and the number
        and the size of registrations are limited."""
        quota = self._node.options.quotas.participants
        if (reason := self._known.unlisted(family, sender)) is not None:
            # The replica may be about to be added: it repeats its registration, which counts once a member declared it.
            return Reject(sender, "participate", m.event_type, reason, code=NOT_LISTED)
        if (reason := self._known.no_member(family, sender)) is not None:
            reason = f"{reason}: only its replicas take part in {family!r}"
            return Reject(sender, "participate", m.event_type, reason, f"voter {m.voter}")
        key = voter_key(sender.identity, m.voter)
        beyond: str | None = None
        own = [s for s in standing.registrations.values() if s.identity == sender.identity]
        if key not in standing.registrations and len(own) >= quota:
            beyond = f"{sender.identity} takes part in {family} {quota} times, which is the quota: end some first"
        beyond = beyond or self._beyond_bytes(family, standing, key, m, sender)
        if beyond is None:
            return None
        return Reject(sender, "participate", m.event_type, beyond, f"voter {m.voter}", code="quota")

    def _beyond_bytes(
        self, family: str, standing: StandingRegistrations, key: str, m: StandingRegistered, sender: Sender
    ) -> str | None:
        quotas = self._node.options.quotas
        size, most = m.filter.encoded_bytes(), quotas.filter_bytes
        if size * quotas.participants <= most:
            return None  # even the greatest number of such filters is within the quota
        own = [s.filter for k, s in standing.registrations.items() if k != key and s.identity == sender.identity]
        if size + sum(f.encoded_bytes() for f in own) <= most:
            return None
        return (
            f"the filters by which {sender.identity} takes part in {family} take over {most} bytes with this one, "
            "which is the quota: use shorter ones, or end some first"
        )

    def on_withdrawn(self, m: StandingWithdrawn, sender: Sender, at: Address, now: float) -> list[Effect]:
        return self._lose((voter_key(sender.identity, m.voter),), "the participant withdrew")

    def on_lease(self, event_type: str, now: float) -> list[Effect]:
        """Expire the standing registrations that were not renewed in time."""
        epochs = self._known.epochs.get(event_type)
        if epochs is None:
            return []
        effects: list[Effect] = []
        for expired in epochs.standing.expire(now):
            effects += self._lose((expired.key,), "the participant did not renew its registration")
        if epochs.standing.registrations:
            effects.append(SetTimer(("lease", event_type), self._node.options.lease_s))
        return effects
