"""Sends voters the decision on an epoch, with the coordinator's signature where the cluster has keys.

A voter that receives the decision can relay it, with its signature, to a peer that is in doubt while the coordinator is
silent. So a signed text must never become false: the coordinator signs what it decides, and in response to a request
only what it can't decide otherwise any more.
"""

from collections.abc import Callable

from tops.core.log.event_log import EventLog
from tops.model.ids import NodeId
from tops.protocol.effects import Effect, SendTo
from tops.protocol.messages import Address, EpochDecided, EpochId, decision_text

Sign = Callable[[bytes], bytes]  # a text -> the proof that this broker wrote it
CheckProof = Callable[[bytes, NodeId, bytes], str]  # a text, its broker, the proof -> why it proves nothing, or empty


class DecisionSender:
    """Turns the decisions of one event type's coordinator into messages."""

    def __init__(self, log: EventLog | None, sign: Sign | None, is_over: Callable[[EpochId], bool]) -> None:
        """`sign` is None in a cluster without keys; `is_over`: whether an attempt can't be decided any more."""
        self._log, self._sign, self._is_over = log, sign, is_over
        self._latest = (b"", b"")  # text and proof: one signature for all voters of an epoch

    def decided(self, epoch: EpochId, digest: str, voter: str, committing: frozenset[str], to: Address) -> Effect:
        """For a voter of an epoch that has just been decided, or is being finished."""
        return self._decision(epoch, digest, voter, committing, to, self._sign)

    def in_response(self, epoch: EpochId, digest: str, voter: str, committing: frozenset[str], to: Address) -> Effect:
        """The response to a voter that requests the outcome of an epoch that is not in flight.

        The id and the members of an attempt can be foreseen before it is sent, and "abort" is true of it only until
        then. Such a response is not signed: a node that requested it in advance could present it after that attempt has
        committed."""
        return self._decision(epoch, digest, voter, committing, to, self._sign if self._is_over(epoch) else None)

    def _decision(
        self,
        epoch: EpochId,
        digest: str,
        voter: str,
        committing: frozenset[str],
        to: Address,
        sign: Sign | None,
    ) -> Effect:
        log_digest = (self._log.chain.at(epoch.number) or "") if self._log is not None and committing else ""
        proof = b""
        if sign is not None:
            text = decision_text(epoch, digest, committing, log_digest)
            if text != self._latest[0]:
                self._latest = (text, sign(text))
            proof = self._latest[1]
        decided = EpochDecided(
            epoch=epoch, digest=digest, voter=voter, committing=committing, log_digest=log_digest, proof=proof
        )
        return SendTo(to, decided)
