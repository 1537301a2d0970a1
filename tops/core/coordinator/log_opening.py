"""A log after a start of its broker: is this journal as new as what was acknowledged?

A journal can be older than its replicas: somebody restored a backup of it, or a disk lost what it had confirmed. It
looks like any other journal, and whoever went on from it would give out indexes again. So on every start the replicas
that were in sync (on a log without voters: those that follow it) are asked where they are before an index is given out,
an abort is presumed or an entry is served.

    OPENING -> open      everybody told, and each holds a prefix of this log
    OPENING -> open      `tail_wait_s` is over: who is silent takes no part before it has told
    OPENING -> STALE     somebody is ahead, or holds another history that nobody contradicts
    STALE   -> open      an operator begins a new history, or ends the durable subscription of that replica

Why going on without the silent ones is bearable. A commit behind our end needs the vote of a replica that was in sync
at our end (joiners never decide alone), so whoever hears all of them hears of it; under write-all each of them has it,
so one is enough. Under a quorum, or where replicas only follow, the silent one may be the only one that knows. It is
waited for, for a while: a broker and a replica that lose power together must not stop the others for ever. After that
the price of being wrong is paid loudly: the silent replica is out of the in-sync set, on disk, before the first index
is given out without it, and when it comes back ahead of our end it is named in an alarm and stays out. Nobody hears
nothing: while not a single replica has told, the log stays closed, for there is nothing to go on with.

A torn end is no exception: what a crash cuts off was never acknowledged, so replicas are not ahead of it. If they are,
the journal lost what it had confirmed, or it is a copy that was taken while the broker was running.
"""

from tops.core.commit.epochs import EpochCoordinator
from tops.core.coordinator.known_types import KnownTypes
from tops.core.coordinator.open_transactions import RendezvousNode
from tops.core.log.event_log import EventLog, Feed, Opening, Relation, Unconfirmed
from tops.model.log_points import LogPoint
from tops.protocol.effects import Alarm, Effect, Persist, Reject, SendTo, SetTimer
from tops.protocol.messages import (
    Address,
    AppliedIndexReported,
    GetAppliedIndex,
    HistoryDiffers,
    HistoryRejected,
    LogEntry,
    Sender,
    StaleJournal,
)
from tops.protocol.records import HistoryBegun, InSyncChanged, LogAppended, LogStale, ReplicasUnconfirmed


class LogOpenings:
    """The logs of one rendezvous, and how its replicas' points compare with them."""

    def __init__(self, node: RendezvousNode, known: KnownTypes) -> None:
        self._node, self._known = node, known
        self._ahead: set[tuple[str, str]] = set()  # logs, and who was ahead of them when they went on without it

    # --------------------------------------------------------------------------------------------------- the start

    def recover(self, record: LogStale | HistoryBegun | ReplicasUnconfirmed) -> None:
        log = self._known.logs[record.event_type]
        match record:
            case LogStale(replica=replica, point=point):
                log.stale = StaleJournal(log.event_type, log.chain.end.index, replica, point.index)
            case HistoryBegun(point=point, end=end, incarnation=incarnation):
                log.begin_history(point, end, incarnation)
            case ReplicasUnconfirmed(ends=ends, incarnations=incarnations):
                log.unconfirmed = {name: Unconfirmed(end, incarnations[name]) for name, end in ends.items()}

    def recovered(self) -> list[Effect]:
        """The journal is read: ask whoever can tell whether it is the newest one."""
        effects: list[Effect] = []
        for log in self._known.logs.values():
            voters = self._epochs(log).standing.in_sync
            awaited = voters or frozenset([feed.replica for feed in log.feeds.values() if feed.replica])
            if awaited or log.stale is not None:
                log.opening = Opening(log.chain.end.index, awaited, reported={}, feeds={}, waiting=[])
                effects.append(SetTimer(("tail", log.event_type), self._node.options.tail_wait_s))
            else:
                effects += _fill_gaps(log)
        return effects

    def on_timer(self, event_type: str) -> list[Effect]:
        log = self._known.logs[event_type]
        opening = log.opening
        if opening is None or log.stale is not None:
            return []
        if opening.reported:
            return self._finish(log, opening)
        text = f"{log.event_type} gives out no index: waiting to hear from {names(opening.silent)}"
        return [Alarm("replicas-silent", text), SetTimer(("tail", event_type), self._node.options.tail_wait_s)]

    # ------------------------------------------------------------------------------------------ who tells, and what

    def must_report(self, log: EventLog, site: str) -> bool:
        """Whether a replica has to tell where it is before it is served or counted."""
        return site in log.unconfirmed or (log.opening is not None and site not in log.opening.reported)

    def request_index(self, log: EventLog, feed: Feed) -> list[Effect]:
        """Ask the replica behind a durable subscription. One that was too far, and still holds that, is told so each
        time; a copy of another one may be in its place by now."""
        end, resumed_in = (log.opening.end, None) if log.opening is not None else log.unconfirmed[feed.replica]
        awaited = GetAppliedIndex(
            name=feed.name,
            event_type=log.event_type,
            incarnation=self._node.incarnation,
            end=end,
            resumed_in=resumed_in,
            since=log.began_in,
        )
        if (log.event_type, feed.replica) not in self._ahead or feed.reported is None or _holds(log, feed.reported):
            return [SendTo(feed.address, awaited)]
        return [SendTo(feed.address, awaited), _rejected(log, feed, log.chain.end)]

    def knows(self, log: EventLog, site: str) -> bool:
        """Whether a replica stands in the log's way although nothing is kept for it."""
        return site in log.unconfirmed or site in log.differing or (log.stale is not None and log.stale.replica == site)

    def hold(self, log: EventLog, feed: Feed) -> None:
        """A replica's feed is served when the log is open."""
        if log.opening is not None:
            log.opening.feeds[feed.key] = feed

    def on_applied_index(self, m: AppliedIndexReported, sender: Sender, at: Address, now: float) -> list[Effect]:
        log, identity = self._known.logs.get(m.event_type), sender.identity
        if log is None or m.incarnation != self._node.incarnation:
            return []
        if self._known.no_member(log.event_type, sender) is not None:
            return [_no_member(log, sender)]
        if log.opening is None:
            return self._reported_late(log, identity, m) if identity in log.unconfirmed else []
        follows = any(feed.replica == identity for feed in [*log.opening.feeds.values(), *log.feeds.values()])
        if identity not in log.opening.awaited and not follows:
            return [_no_member(log, sender)]  # it was neither in sync, nor does it follow the log as a replica
        log.opening.reported[identity] = m
        return [] if log.stale is not None else self._look(log, log.opening)

    def _reported_late(self, log: EventLog, site: str, m: AppliedIndexReported) -> list[Effect]:
        end = log.unconfirmed[site].end
        # Behind the end, only the digest tells a copy that followed the log from a database that went its own way.
        is_ours = m.point.index <= end or _holds(log, m.point)
        if m.decided <= max(end, m.point.index) and is_ours and log.relation(m.point) is Relation.PREFIX:
            self._ahead.discard((log.event_type, site))
            del log.unconfirmed[site]
            return [Persist(replicas_unconfirmed(log))]
        if (log.event_type, site) in self._ahead:
            return []
        self._ahead.add((log.event_type, site))
        text = (
            f"{site} is at {m.point} of {log.event_type}, and the log went on without it behind {end}: what it alone "
            f"holds was perhaps acknowledged; look at it, then stop it, empty its database and start it again: it gets "
            f"a copy of another one"
        )
        return [Alarm("ahead-of-log", text)]

    def _look(self, log: EventLog, opening: Opening) -> list[Effect]:
        for site, reported in opening.reported.items():
            ahead = reported.decided > opening.end and reported.point.history == log.chain.history
            if ahead or log.relation(reported.point) is Relation.AHEAD:
                return self._stale(log, opening, site, reported)
        return [] if opening.silent else self._finish(log, opening)

    def _finish(self, log: EventLog, opening: Opening) -> list[Effect]:
        """Everybody has told, or had the time to."""
        others = {s: t for s, t in opening.reported.items() if log.relation(t.point) is Relation.OTHER}
        confirmed = max([t.point.index for s, t in opening.reported.items() if s not in others], default=-1)
        for site in sorted(others.keys() & opening.awaited):
            # Another replica that holds our log at least as far shows that this one is the odd one. Else it is us: an
            # index that we would call void may be what it has committed.
            if others[site].point.index > confirmed:
                return self._stale(log, opening, site, others[site])
        return self._open(log, opening, frozenset(others))

    def _open(self, log: EventLog, opening: Opening, others: frozenset[str]) -> list[Effect]:
        epochs, silent = self._epochs(log), opening.silent
        effects: list[Effect] = []
        if silent:
            for name in silent:
                log.unconfirmed.setdefault(name, Unconfirmed(opening.end, self._node.incarnation))
            text = f"{names(silent)} did not tell in time how far {log.event_type} is: it goes on behind {opening.end}"
            effects += [Persist(replicas_unconfirmed(log)), Alarm("replicas-silent", text)]
        effects += self._without(epochs, log, silent | others)
        log.opening = None
        effects += _fill_gaps(log) + epochs.start()
        for then in opening.waiting:
            effects += then()
        for feed in opening.feeds.values():
            if feed.reported is not None and not self.must_report(log, feed.replica):
                fits, problem = self.judge(log, feed.replica, feed.reported)
                effects += log.want(feed) if fits else problem + self.reject(log, feed, feed.reported)
        return effects

    # ---------------------------------------------------------------------------------------- whoever comes later

    def reject(self, log: EventLog, feed: Feed, reported: LogPoint) -> list[Effect]:
        """Nothing is served to, or kept for, a replica that holds another history; it is told so each time it asks."""
        log.end(feed.key)
        if feed.replica not in log.differing:
            return []
        own = log.chain.end if reported.index > log.chain.end.index else _at(log, reported.index)
        return [_rejected(log, feed, own)]

    def judge(self, log: EventLog, site: str, point: LogPoint) -> tuple[bool, list[Effect]]:
        """Compare a replica with an open log: whether it may be served and counted."""
        match log.relation(point):
            case Relation.PREFIX:
                log.differing.discard(site)
                return True, []
            case Relation.AHEAD:
                return False, self._overtaken(log, site, point)
            case Relation.OTHER:
                return False, self._exclude(log, site, point)

    def on_differs(self, m: HistoryDiffers, sender: Sender, at: Address, now: float) -> list[Effect]:
        """A replica found out by itself that it holds another history."""
        log = self._known.logs.get(m.event_type)
        if log is None or log.opening is not None:
            return []
        if self._known.no_member(log.event_type, sender) is not None:
            return [_no_member(log, sender)]
        return self._exclude(log, sender.identity, m.point)

    def _exclude(self, log: EventLog, site: str, point: LogPoint) -> list[Effect]:
        if site in log.differing:
            return []
        log.differing.add(site)
        text = (
            f"{site} holds {point} of {log.event_type}, which is not what the log has there: it takes no part; stop "
            f"it, empty its database and start it again, then it gets a copy of another one"
        )
        return [*self._without(self._epochs(log), log, frozenset([site])), Alarm("other-history", text)]

    def _overtaken(self, log: EventLog, site: str, point: LogPoint) -> list[Effect]:
        """The log is open, and a replica that nobody knew of is ahead of it."""
        log.opening = opening = Opening(log.chain.end.index, frozenset([site]), reported={}, feeds={}, waiting=[])
        reported = AppliedIndexReported(
            event_type=log.event_type,
            incarnation=self._node.incarnation,
            point=point,
            decided=point.index,
            transactions=(),
        )
        opening.reported[site] = reported
        return self._stale(log, opening, site, reported)

    def _stale(self, log: EventLog, opening: Opening, site: str, reported: AppliedIndexReported) -> list[Effect]:
        index = max(reported.point.index, reported.decided)
        log.stale = stale = StaleJournal(log.event_type, opening.end, site, index)
        record = LogStale(event_type=log.event_type, replica=site, point=reported.point)
        effects: list[Effect] = [Persist(record), Alarm("journal-stale", str(stale))]
        effects += self._epochs(log).reject_all(stale)
        waiting, opening.waiting = opening.waiting, []
        for then in waiting:
            effects += then()
        return effects

    def ended(self, log: EventLog, site: str) -> None:
        """The durable subscription of a replica has ended: it is not waited for, and not looked at."""
        log.unconfirmed.pop(site, None)
        log.differing.discard(site)
        self._ahead.discard((log.event_type, site))
        if log.stale is not None and log.stale.replica == site:
            log.stale = None
        if log.opening is not None:
            log.opening.awaited -= {site}
            log.opening.reported.pop(site, None)

    def on_ended(self, log: EventLog, site: str) -> list[Effect]:
        """An operator has ended the durable subscription of a replica that is gone for good."""
        unconfirmed = site in log.unconfirmed
        self.ended(log, site)
        effects: list[Effect] = [Persist(replicas_unconfirmed(log))] if unconfirmed else []
        effects += self._without(self._epochs(log), log, frozenset([site]))
        if log.opening is None or log.stale is not None:
            return effects
        return effects + self._look(log, log.opening)

    def _without(self, epochs: EpochCoordinator, log: EventLog, sites: frozenset[str]) -> list[Effect]:
        in_sync = epochs.standing.in_sync - sites
        if in_sync == epochs.standing.in_sync:
            return []
        epochs.standing.in_sync = in_sync
        return [Persist(InSyncChanged(event_type=log.event_type, in_sync=in_sync))]

    def _epochs(self, log: EventLog) -> EpochCoordinator:
        return self._known.epochs[log.event_type]


def _holds(log: EventLog, point: LogPoint) -> bool:
    """Whether the log is known to have held the same as a replica at its index."""
    return log.chain.at(point.index) == point.digest


def _rejected(log: EventLog, feed: Feed, own: LogPoint) -> Effect:
    return SendTo(feed.address, HistoryRejected(name=feed.name, event_type=log.event_type, point=own))


def _no_member(log: EventLog, sender: Sender) -> Effect:
    reason = f"{sender.node} says how far it is in {log.event_type!r}, and is none of those who follow it as replicas"
    return Reject(sender, "participate", log.event_type, reason)


def _fill_gaps(log: EventLog) -> list[Effect]:
    """Indexes that an earlier incarnation gave out and never decided are void."""
    effects: list[Effect] = []
    for number in log.missing_numbers():
        entry = LogEntry(number=number)
        log.fill(entry)
        effects.append(Persist(LogAppended(event_type=log.event_type, entry=entry)))
    return effects


def _at(log: EventLog, index: int) -> LogPoint:
    return LogPoint(log.chain.history, index, log.chain.at(index) or "")


def replicas_unconfirmed(log: EventLog) -> ReplicasUnconfirmed:
    """For the journal: who of this log is still to be heard."""
    ends = {name: unconfirmed.end for name, unconfirmed in log.unconfirmed.items()}
    incarnations = {name: unconfirmed.incarnation for name, unconfirmed in log.unconfirmed.items()}
    return ReplicasUnconfirmed(event_type=log.event_type, ends=ends, incarnations=incarnations)


def names(sites: frozenset[str]) -> str:
    return ", ".join(sorted(sites)) or "nobody"
