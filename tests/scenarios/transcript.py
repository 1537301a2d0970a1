"""What the machines of a simulated cluster receive and want done, as text that is read, compared and recorded again.

An input is a line with its time and its node; the effects that the node carries out follow, in order. What a message
says is shown where it is sent. Timers that are set and inputs without an effect are left out.
"""

from collections.abc import Callable, Collection, Mapping
from enum import Enum
from typing import Any

import msgspec

from tests.scenarios.cluster import Cluster, content_of
from tops.protocol.effects import Alarm, Call, CancelTimer, Effect, Note, Persist, SendOnLink, SetTimer
from tops.protocol.messages import Address, Envelope, EpochId
from tops.sim.nodes import SimNode

SILENT = (SetTimer, CancelTimer)
DIGEST_CHARACTERS = 6  # of hashes and other long hexadecimal words: enough to tell them apart
Step = Callable[..., list[Effect]]


class Transcript:
    """What happens in a cluster from now on."""

    def __init__(self, cluster: Cluster) -> None:
        self._world = cluster.world
        self._began = cluster.world.clock.now
        self._at: tuple[str, str] | None = None  # the time and the node of the line before
        self._input = ""  # of which no effect was seen yet
        self._names: dict[str, str] = {}  # of sites, by the handles that brokers give them
        self._said: list[object] = []  # bodies of messages, which are shown where they are sent first
        self.lines: list[str] = []
        cluster.world.on_effect = self._effect
        for node in (*cluster.world.brokers.values(), *cluster.world.sites.values()):
            self._watch(node)

    def say(self, text: str) -> None:
        """What the scenario does."""
        self.lines += ["", f"# {text}"]
        self._at = None

    def _watch(self, node: SimNode) -> None:
        act, take, fire = node._act, node._take, node._timer

        def watched(step: Step, args: tuple[Any, ...]) -> None:
            if step == take:
                self._input = f"<- {args[0]}: {type(content_of(args[1])).__name__}"
            elif step == fire:
                self._input = f"timer {' '.join(map(str, args[0]))}"
            else:
                self._input = step.__name__.strip("_<>")
            act(step, args)
            self._input = ""

        node._act = watched  # type: ignore[method-assign]

    def _effect(self, node: SimNode, effect: Effect) -> None:
        if isinstance(effect, SILENT):
            return
        now = f"{self._world.clock.now - self._began:8.4f}"
        if self._input or self._at != (now, node.name):
            self.lines.append(f"{now}  {node.name:<3} {self._input or 'goes on'}")
        self._at, self._input = (now, node.name), ""
        self.lines.append(f"{'':14}{self._shown_effect(effect)}")

    def _shown_effect(self, effect: Effect) -> str:
        match effect:
            case SendOnLink(link=link, message=Envelope(to=to, body=body)):
                passed_on = "" if to.broker == link and not to.handle else f" for {self._name_of(to)}"
                return f"-> {link}{passed_on}: {self._first_shown(body)}"
            case SendOnLink(link=link, message=message):
                return f"-> {link}: {self._first_shown(content_of(message))}"
            case Persist(record=record):
                return f"persist {self.shown(record)}"
            case Note(record=record):
                return f"note {self.shown(record)}"
            case Alarm(kind=kind, text=text):
                return f"alarm {kind}: {text}"
            case Call():
                return f"call {self.shown(effect)}"
            case _:
                return self.shown(effect)

    def _first_shown(self, body: object) -> str:
        if any(body is said for said in self._said):
            return f"{type(body).__name__}, forwarded"
        self._said.append(body)
        return self.shown(body)

    def _name_of(self, address: Address) -> str:
        for broker in self._world.brokers.values():
            if broker.up:
                self._names |= {handle: site.name for handle, site in broker.core.edge.owners.items()}
        return f"{self._names.get(address.handle, '?')}" if address.handle else address.broker

    def shown(self, value: object) -> str:
        """A value as text that is the same in every run: sets are sorted, defaults and empty fields left out."""
        match value:
            case Address():
                return self._name_of(value)
            case EpochId():
                return str(value)
            case msgspec.Struct():
                fields = ((f.name, f.default, getattr(value, f.name)) for f in msgspec.structs.fields(value))
                said = [f"{name}={self.shown(v)}" for name, default, v in fields if v != default and not _is_empty(v)]
                return f"{type(value).__name__}({', '.join(said)})"
            case Enum():
                return str(value.value)
            case bytes():
                return value.hex()[:DIGEST_CHARACTERS]
            case str():
                return value[:DIGEST_CHARACTERS] if _is_digest(value) else value
            case Mapping():
                return "{" + ", ".join(sorted(f"{self.shown(k)}: {self.shown(v)}" for k, v in value.items())) + "}"
            case set() | frozenset():
                return "{" + ", ".join(sorted(map(self.shown, value))) + "}"
            case list() | tuple():
                return "[" + ", ".join(map(self.shown, value)) + "]"
            case _:
                return str(value)


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, Collection) and not value)


def _is_digest(text: str) -> bool:
    return len(text) >= 16 and all(c in "0123456789abcdef" for c in text)
