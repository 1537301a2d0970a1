"""Logs whose last records may be lost: a crash tore the journal's end, and it was cut off.

Nothing that was told rests on a record that never came to the disk, if the disk keeps its word. In case it did not,
whoever was in sync is asked how far it has come before any number behind the end is given out again, and before
anything behind it is presumed to be aborted. What a replica has beyond the end stays: the log goes on behind that, and
who lacks it finds it no longer kept, and is copied anew.

Nobody is waited for without end: a broker and a replica that die together must not stop the others. Who is not heard
in time takes no part before it has told; if it turns out to have been behind the end, it is named and stays away.
"""

from collections.abc import Mapping

from tops.core.epochs import EpochCoordinator
from tops.core.event_log import EventLog, LostTail, Unheard, feed_key, identity_of_feed
from tops.core.known_types import KnownTypes
from tops.core.open_transactions import RendezvousNode
from tops.core.outcomes import Outcomes
from tops.effects import Alarm, Effect, Persist, Post, SetTimer
from tops.messages import Address, AskReached, LogWanted, ReachedTold, Sender, TxOutcome
from tops.records import InSyncChanged, TailFound, TailLost, TailUnheard
from tops.transactions import Outcome

TAIL_LOST = "the coordinator's journal lost its end in a crash: its replicas are asked how far they are"


class LostTails:
    """The logs of one rendezvous, from a journal that was cut off to the word of everybody who was in sync."""

    def __init__(self, node: RendezvousNode, known: KnownTypes, outcomes: Outcomes) -> None:
        self._node, self._known, self._outcomes = node, known, outcomes
        self._ahead: set[tuple[str, str]] = set()  # logs, and who was behind an end of theirs that was lost

    def recover(self, record: TailLost | TailFound | TailUnheard) -> None:
        log = self._known.logs[record.event_type]
        match record:
            case TailLost(end=end):
                log.lost = LostTail(end, frozenset())
            case TailFound(end=end, reached=reached):
                log.resume_after(end, reached)
            case TailUnheard(ends=ends, lives=lives):
                log.unheard = {
                    name: Unheard(end, lives.get(name, self._node.incarnation)) for name, end in ends.items()
                }

    def recovered(self, torn: bool) -> list[Effect]:
        """The journal is read. Whoever was in sync is asked when it is heard of."""
        effects: list[Effect] = []
        for log in self._known.logs.values():
            in_sync = self._epochs(log).standing.in_sync
            if (torn or log.lost is not None) and (in_sync or log.subscribers):
                end = log.lost.end if log.lost is not None else log.last_number
                log.lost = LostTail(end, in_sync, reached={}, transactions={})
                text = f"{log.event_type} may have gone on behind {end}: waiting to hear from {_names(in_sync)}"
                effects += [Persist(TailLost(event_type=log.event_type, end=end)), Alarm("tail-lost", text)]
                effects.append(SetTimer(("tail", log.event_type), self._node.options.tail_wait_s))
            else:
                log.lost = None  # nobody is left who could tell
        return effects

    def on_timer(self, event_type: str) -> list[Effect]:
        log = self._known.logs[event_type]
        return [] if log.lost is None else self._found(log, log.lost)

    def awaits(self, log: EventLog, identity: str) -> bool:
        """Whether this replica must tell how far it was before it is served or counted."""
        return identity in log.unheard or (log.lost is not None and identity in log.lost.unheard)

    def ask(self, log: EventLog, name: str, sender: Sender, at: Address) -> list[Effect]:
        """Ask the replica behind a durable subscription how far it is, unless it is known to have been too far."""
        if (log.event_type, sender.identity) in self._ahead:
            return []
        end, life = (log.lost.end, None) if log.lost is not None else log.unheard[sender.identity]
        asked = AskReached(
            name=name, event_type=log.event_type, incarnation=self._node.incarnation, end=end, went_on_in=life
        )
        return [Post(at, asked)]

    def on_wanted(self, log: EventLog, m: LogWanted, sender: Sender, at: Address) -> list[Effect]:
        """A durable subscription of somebody who is not waited for: if it is a replica's, it can tell as well."""
        lost = log.lost
        if lost is None:
            if m.position is None or m.position <= log.last_number or m.voter is not None:
                return []  # a voter's position is judged with its standing answer
            who = feed_key(sender, m.name)
            text = f"{who} has taken {m.position}, and the log of {log.event_type} ends at {log.last_number}"
            return [Alarm("ahead-of-log", text)]
        if sender.identity in lost.reached:
            return []
        return self.ask(log, m.name, sender, at)

    def on_told(self, m: ReachedTold, sender: Sender, at: Address, now: float) -> list[Effect]:
        log = self._known.logs.get(m.event_type)
        if log is None or m.incarnation != self._node.incarnation:
            return []
        if log.lost is None:
            return self._told_late(log, sender.identity, m.reached) if sender.identity in log.unheard else []
        follows = any(identity_of_feed(feed.key) == sender.identity for feed in log.subscribers)
        if sender.identity not in log.lost.asked and not follows:
            return []  # whoever was neither in sync nor follows the log as a replica has nothing to tell
        log.lost.reached[sender.identity] = m.reached
        log.lost.transactions.update(dict.fromkeys(m.transactions))
        return self._look(log, log.lost) if log.lost.asked else []  # without voters the time decides

    def _told_late(self, log: EventLog, site: str, reached: int) -> list[Effect]:
        end = log.unheard[site].end
        if reached <= end:
            del log.unheard[site]
            return [Persist(tail_unheard(log))]
        self._ahead.add((log.event_type, site))
        text = (
            f"{site} applied {log.event_type} up to {reached}, and the log went on without it behind {end}: end its "
            f"durable subscription and copy it from another replica"
        )
        return [Alarm("ahead-of-log", text)]

    def on_ended(self, log: EventLog, name: str) -> list[Effect]:
        """An operator has ended the durable subscription of a replica that is gone for good: nobody to wait for."""
        standing = self._epochs(log).standing
        effects: list[Effect] = []
        if name in log.unheard:
            del log.unheard[name]
            self._ahead.discard((log.event_type, name))
            effects.append(Persist(tail_unheard(log)))
        if name not in standing.in_sync:
            return effects
        standing.in_sync -= {name}
        effects.append(Persist(InSyncChanged(event_type=log.event_type, in_sync=standing.in_sync)))
        if log.lost is None:
            return effects
        log.lost.asked -= {name}
        return effects + self._look(log, log.lost)

    def _look(self, log: EventLog, lost: LostTail) -> list[Effect]:
        return [] if lost.unheard else self._found(log, lost)

    def _found(self, log: EventLog, lost: LostTail) -> list[Effect]:
        """Everybody has told, or had the time to: the log goes on behind the furthest of them."""
        epochs = self._epochs(log)
        gone = self._go_on_without(log, lost, epochs) if lost.unheard else []
        reached = max(lost.reached.values(), default=lost.end)
        log.resume_after(lost.end, reached)
        effects = [*gone, Persist(TailFound(event_type=log.event_type, end=lost.end, reached=reached))]
        if log.missing:
            effects += self._adopt(log, lost, epochs)
        return effects + epochs.start()

    def _go_on_without(self, log: EventLog, lost: LostTail, epochs: EpochCoordinator) -> list[Effect]:
        for name in lost.unheard:
            log.unheard.setdefault(name, Unheard(lost.end, self._node.incarnation))
        epochs.standing.in_sync -= lost.unheard
        changed = InSyncChanged(event_type=log.event_type, in_sync=epochs.standing.in_sync)
        text = (
            f"{_names(lost.unheard)} did not tell in time how far {log.event_type} went: it goes on behind {lost.end}"
        )
        return [Persist(tail_unheard(log)), Persist(changed), Alarm("tail-lost", text)]

    def _adopt(self, log: EventLog, lost: LostTail, epochs: EpochCoordinator) -> list[Effect]:
        effects: list[Effect] = []
        for tx in lost.transactions:
            repeated = next((ready.publisher for ready in epochs.queue if ready.tx == tx), None)
            epochs.withdraw(tx)
            effects += self._outcomes.settle(TxOutcome(tx=tx, outcome=Outcome.COMMITTED), repeated)
        reached = log.missing[-1]
        ahead = _at(lost.reached, reached)
        text = (
            f"{_names(ahead)} applied {log.event_type} up to {reached}, and the journal was cut off behind {lost.end}: "
            f"what lies between is at them alone, and whoever lacks it must be copied from one of them"
        )
        in_sync = epochs.standing.in_sync & ahead
        epochs.standing.in_sync = in_sync
        changed = InSyncChanged(event_type=log.event_type, in_sync=in_sync)
        return [Persist(changed), Alarm("ahead-of-log", text), *effects]

    def _epochs(self, log: EventLog) -> EpochCoordinator:
        return self._known.epochs[log.event_type]


def tail_unheard(log: EventLog) -> TailUnheard:
    """For the journal: who of this log is still to be heard."""
    ends = {name: unheard.end for name, unheard in log.unheard.items()}
    lives = {name: unheard.life for name, unheard in log.unheard.items()}
    return TailUnheard(event_type=log.event_type, ends=ends, lives=lives)


def _at(reached: Mapping[str, int], number: int) -> frozenset[str]:
    return frozenset(name for name, position in reached.items() if position == number)


def _names(names: frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "nobody"
