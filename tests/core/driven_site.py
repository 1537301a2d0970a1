"""A site's machine with an obedient application: calls are answered at once unless a test wants to."""

from typing import TypeVar

from tops.core.client.site import SiteCore
from tops.core.commit.decision_sender import CheckProof
from tops.core.participant.participation import Wish
from tops.model.ids import NodeId
from tops.protocol.effects import BatchPrepared, Call, Effect, PrepareBatch, SendOnLink
from tops.protocol.messages import Address, AddressedMessage, Envelope, LinkMessage, Message, StandingRegistered

BROKER = NodeId("b")
E = TypeVar("E", bound=Effect)
L = TypeVar("L", bound=Message)


class DrivenSite:
    """Feeds letters to a site, answers its participants' calls, and keeps every effect."""

    def __init__(self, name: str = "s", incarnation: int = 1, check_proof: CheckProof | None = None) -> None:
        numbers = iter(range(1, 1000))

        def entropy(size: int) -> bytes:
            return next(numbers).to_bytes(size, "big")

        self.core = SiteCore(NodeId(name), incarnation, [BROKER], entropy, check_proof=check_proof)
        self.effects: list[Effect] = []
        self.answering = True
        self.take(self.core.link_up(BROKER, 0.0))

    def take(self, effects: list[Effect]) -> None:
        self.effects += effects
        for effect in effects:
            if isinstance(effect, Call) and self.answering:
                self.answer(effect)

    def answer(self, call: Call) -> None:
        result = None
        if isinstance(call, PrepareBatch):
            result = BatchPrepared({}, tuple((1,) for _ in call.members))
        self.take(self.core.call_done(call.call, result))

    def subscribe(self, number: int, wish: Wish) -> str:
        """What the new subscription votes under."""
        self.take(self.core.subscribe(number, number, wish))
        return self.sent_messages(StandingRegistered)[-1].voter

    def deliver(self, message: AddressedMessage) -> None:
        self.receive(Envelope(to=Address(BROKER, self.core.name), body=message))

    def receive(self, message: LinkMessage) -> None:
        self.take(self.core.receive(message, 0.0))

    def made(self, kind: type[E]) -> list[E]:
        return [e for e in self.effects if isinstance(e, kind)]

    def sent_messages(self, kind: type[L]) -> list[L]:
        sent = [e.message for e in self.made(SendOnLink)]
        return [m.body for m in sent if isinstance(m, Envelope) and isinstance(m.body, kind)]
