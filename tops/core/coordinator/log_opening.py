"""A log after a start of its broker: is this journal as new as what was acknowledged?

A journal can be older than its replicas: an operator restored a backup of it, or a disk lost what it had confirmed.
Such a journal looks like any other one, and a coordinator that continued it would assign indexes a second time. So on
every start the coordinator requests their applied index from the replicas that were in sync (on a log without voters:
from those that follow it), before it assigns an index, presumes an abort or serves an entry.

    OPENING -> open      every replica has reported, and each holds a prefix of this log
    OPENING -> open      `tail_wait_s` has passed: a silent replica takes no part until it has reported
    OPENING -> STALE     a replica is ahead, or holds another history that no other replica contradicts
    STALE   -> open      an operator begins a new history, or ends the durable subscription of that replica

Why it is acceptable to continue without the silent replicas. A commit behind the journal's end needs the vote of a
replica that was in sync at that end (joiners never decide alone). So the reports of all of them reveal it; under
write-all each of them has it, so one report is enough. Under a quorum, or where replicas only follow, a silent replica
may be the only one that has it. The coordinator waits for it, but not without limit: a broker and a replica that lose
power together must not stop the others for ever. After that limit a wrong guess is made visible: the journal records
that the silent replica has left the in-sync set before the first index is assigned without it, and if the replica
comes back ahead of the journal's end, an alarm names it and it stays excluded. While no replica has reported at all,
the log stays closed: there is nothing to compare the journal with.

A torn end of the journal is no exception: what a crash cuts off was never acknowledged, so replicas are not ahead of
it. If they are, the journal lost what it had confirmed, or it is a copy that was taken while the broker was running.
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
        self._ahead: set[tuple[str, str]] = set()  # logs, and replicas that turned out to be ahead of them too late

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
        """The journal is read: wait for the replicas that can confirm that it is the newest one."""
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
        text = f"{log.event_type} assigns no index: waiting for the applied index of {names(opening.silent)}"
        return [Alarm("replicas-silent", text), SetTimer(("tail", event_type), self._node.options.tail_wait_s)]

    # -------------------------------------------------------------------------------------------- applied indexes

    def must_report(self, log: EventLog, site: str) -> bool:
        """Whether a replica has to report its applied index before it is served or counted."""
        return site in log.unconfirmed or (log.opening is not None and site not in log.opening.reported)

    def request_index(self, log: EventLog, feed: Feed) -> list[Effect]:
        """Request the applied index of the replica behind a durable subscription. A replica that was ahead, and still
        holds the same data, gets a rejection with each request; by now its database may be a copy of another one."""
        end, resumed_in = (log.opening.end, None) if log.opening is not None else log.unconfirmed[feed.replica]
        request = GetAppliedIndex(
            name=feed.name,
            event_type=log.event_type,
            incarnation=self._node.incarnation,
            end=end,
            resumed_in=resumed_in,
            since=log.began_in,
        )
        if (log.event_type, feed.replica) not in self._ahead or feed.reported is None or _holds(log, feed.reported):
            return [SendTo(feed.address, request)]
        return [SendTo(feed.address, request), _rejected(log, feed, log.chain.end)]

    def knows(self, log: EventLog, site: str) -> bool:
        """Whether a replica restricts the log although the journal retains nothing for it."""
        return site in log.unconfirmed or site in log.differing or (log.stale is not None and log.stale.replica == site)

    def hold(self, log: EventLog, feed: Feed) -> None:
        """Keep a replica's feed, to serve it when the log is open."""
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
            return [_no_member(log, sender)]  # it was not in sync, and it does not follow the log as a replica
        log.opening.reported[identity] = m
        return [] if log.stale is not None else self._compare(log, log.opening)

    def _reported_late(self, log: EventLog, site: str, m: AppliedIndexReported) -> list[Effect]:
        end = log.unconfirmed[site].end
        # Behind the end, only the digest distinguishes a copy that followed the log from a database that diverged.
        is_ours = m.point.index <= end or _holds(log, m.point)
        if m.decided <= max(end, m.point.index) and is_ours and log.relation(m.point) is Relation.PREFIX:
            self._ahead.discard((log.event_type, site))
            del log.unconfirmed[site]
            return [Persist(replicas_unconfirmed(log))]
        if (log.event_type, site) in self._ahead:
            return []
        self._ahead.add((log.event_type, site))
        text = (
            f"{site} is at {m.point} of {log.event_type}, and the log continued without it behind {end}: what only it "
            f"holds may have been acknowledged; inspect it, then stop it, empty its database and start it again: it "
            f"gets a copy of another one"
        )
        return [Alarm("ahead-of-log", text)]

    def _compare(self, log: EventLog, opening: Opening) -> list[Effect]:
        for site, reported in opening.reported.items():
            ahead = reported.decided > opening.end and reported.point.history == log.chain.history
            if ahead or log.relation(reported.point) is Relation.AHEAD:
                return self._stale(log, opening, site, reported)
        return [] if opening.silent else self._finish(log, opening)

    def _finish(self, log: EventLog, opening: Opening) -> list[Effect]:
        """Every awaited replica has reported, or the time-out has passed."""
        others = {s: t for s, t in opening.reported.items() if log.relation(t.point) is Relation.OTHER}
        confirmed = max([t.point.index for s, t in opening.reported.items() if s not in others], default=-1)
        for site in sorted(others.keys() & opening.awaited):
            # If another replica holds this log at least as far, the differing replica is the outlier. Otherwise this
            # journal may be the outlier: an index that it would fill with a no-op entry may be committed there.
            if others[site].point.index > confirmed:
                return self._stale(log, opening, site, others[site])
        return self._open(log, opening, frozenset(others))

    def _open(self, log: EventLog, opening: Opening, others: frozenset[str]) -> list[Effect]:
        epochs, silent = self._epochs(log), opening.silent
        effects: list[Effect] = []
        if silent:
            for name in silent:
                log.unconfirmed.setdefault(name, Unconfirmed(opening.end, self._node.incarnation))
            text = (
                f"{names(silent)} did not report an applied index of {log.event_type} in time: the log continues "
                f"behind {opening.end}"
            )
            # Persist before an index is assigned without them: a second restart must not trust their silence.
            effects += [Persist(replicas_unconfirmed(log)), Alarm("replicas-silent", text)]
        effects += self._without(epochs, log, silent | others)
        log.opening = None
        # The gaps are filled before epochs start: a new epoch must not be prepared before an undecided index.
        effects += _fill_gaps(log) + epochs.start()
        for then in opening.waiting:
            effects += then()
        for feed in opening.feeds.values():
            if feed.reported is not None and not self.must_report(log, feed.replica):
                fits, problem = self.judge(log, feed.replica, feed.reported)
                effects += log.want(feed) if fits else problem + self.reject(log, feed, feed.reported)
        return effects

    # --------------------------------------------------------------------------------- replicas that arrive later

    def reject(self, log: EventLog, feed: Feed, reported: LogPoint) -> list[Effect]:
        """Serve and retain nothing for a replica that holds another history; it gets a rejection with each request."""
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
        """A replica reports that it holds another history."""
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
            f"{site} holds {point} of {log.event_type}, and the log has another digest there: the replica takes no "
            f"part; stop it, empty its database and start it again, then it gets a copy of another one"
        )
        return [*self._without(self._epochs(log), log, frozenset([site])), Alarm("other-history", text)]

    def _overtaken(self, log: EventLog, site: str, point: LogPoint) -> list[Effect]:
        """The log is open, and a replica that the journal does not know is ahead of it."""
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
        """The durable subscription of a replica has ended: the log neither waits for it nor compares it."""
        log.unconfirmed.pop(site, None)
        log.differing.discard(site)
        self._ahead.discard((log.event_type, site))
        if log.stale is not None and log.stale.replica == site:
            log.stale = None
        if log.opening is not None:
            log.opening.awaited -= {site}
            log.opening.reported.pop(site, None)

    def on_ended(self, log: EventLog, site: str) -> list[Effect]:
        """An operator has ended the durable subscription of a replica that does not come back."""
        unconfirmed = site in log.unconfirmed
        self.ended(log, site)
        effects: list[Effect] = [Persist(replicas_unconfirmed(log))] if unconfirmed else []
        effects += self._without(self._epochs(log), log, frozenset([site]))
        if log.opening is None or log.stale is not None:
            return effects
        return effects + self._compare(log, log.opening)

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
    reason = f"{sender.node} reports an applied index of {log.event_type!r} and does not follow it as a replica"
    return Reject(sender, "participate", log.event_type, reason)


def _fill_gaps(log: EventLog) -> list[Effect]:
    """Fill indexes that an earlier incarnation assigned and never decided with no-op entries."""
    effects: list[Effect] = []
    for number in log.missing_numbers():
        entry = LogEntry(number=number)
        log.fill(entry)
        effects.append(Persist(LogAppended(event_type=log.event_type, entry=entry)))
    return effects


def _at(log: EventLog, index: int) -> LogPoint:
    return LogPoint(log.chain.history, index, log.chain.at(index) or "")


def replicas_unconfirmed(log: EventLog) -> ReplicasUnconfirmed:
    """The record of the replicas of this log that have not reported yet."""
    ends = {name: unconfirmed.end for name, unconfirmed in log.unconfirmed.items()}
    incarnations = {name: unconfirmed.incarnation for name, unconfirmed in log.unconfirmed.items()}
    return ReplicasUnconfirmed(event_type=log.event_type, ends=ends, incarnations=incarnations)


def names(sites: frozenset[str]) -> str:
    return ", ".join(sorted(sites)) or "none"
