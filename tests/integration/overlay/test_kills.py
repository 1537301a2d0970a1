"""Brokers, publishers and participants that are killed or paused at every step of a distributed transaction.

After each blow everybody is brought back, and then: participants agree, what was told to the publisher is true, every
committed participant has every event once and in order, nothing stays promised, and no acknowledged event is lost.
"""

import asyncio
import itertools
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.integration.overlay.cluster import ROOT, TOPOLOGIES, Cluster, Recorder, until
from tops import EventType, Outcome

STEPS = ("census", "event", "prepare", "decided", "commit")
VICTIMS = ("broker", "publisher", "participant")
PAUSE_S = 3.0  # longer than any heartbeat

SAMPLE = [
    ("census", "publisher", signal.SIGKILL),
    ("event", "participant", signal.SIGKILL),
    ("event", "broker", signal.SIGKILL),
    ("prepare", "broker", signal.SIGKILL),
    ("prepare", "participant", signal.SIGKILL),
    ("decided", "broker", signal.SIGKILL),
    ("decided", "participant", signal.SIGKILL),
    ("commit", "broker", signal.SIGKILL),
    ("commit", "participant", signal.SIGKILL),
    ("prepare", "broker", signal.SIGSTOP),
    ("commit", "participant", signal.SIGSTOP),
]


class Actor:
    """A publisher or participant in its own process."""

    def __init__(self, drama: "Drama", role: str, name: str) -> None:
        self.drama, self.role, self.name = drama, role, name
        self.process: asyncio.subprocess.Process
        self.said: list[dict[str, Any]] = []
        self._listening: asyncio.Task[None] | None = None

    async def start(self) -> None:
        drama = self.drama
        self.said.clear()
        with (drama.cluster.directory / f"{self.name}.log").open("ab") as errors:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tests.integration.overlay.actor_process",
                self.role,
                self.name,
                str(drama.cluster.directory / self.name),
                ",".join(drama.types),
                *drama.cluster.urls,
                cwd=ROOT,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
            )
        self._listening = asyncio.ensure_future(self._listen())
        await self.heard("ready", timeout_s=90)

    async def _listen(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.said.append(json.loads(line))

    def tell(self, *words: str) -> None:
        assert self.process.stdin is not None
        if self.process.returncode is None:
            self.process.stdin.write(" ".join(words).encode() + b"\n")

    def all(self, step: str, **having: Any) -> list[dict[str, Any]]:
        return [s for s in self.said if s["step"] == step and all(s.get(k) == v for k, v in having.items())]

    async def heard(self, step: str, timeout_s: float = 60.0, **having: Any) -> dict[str, Any]:
        await until(lambda: bool(self.all(step, **having)), timeout_s)
        return self.all(step, **having)[-1]

    async def status(self) -> dict[str, Any]:
        before = len(self.all("status"))
        self.tell("status")
        await until(lambda: len(self.all("status")) > before)
        return self.all("status")[-1]

    async def kill(self) -> None:
        with suppress(ProcessLookupError):  # the blow may have been one
            self.process.kill()
        await self.process.wait()
        if self._listening is not None:
            await self._listening


class Drama:
    """One broker, one publisher, two participants, and what befalls them."""

    types = ("kill-orders", "kill-log")

    def __init__(self, directory: Path) -> None:
        self.cluster = Cluster(directory, TOPOLOGIES["single"], "[broker.limits]\nheartbeat_s = 1\nsite_grace_s = 1.5")
        self.publisher = Actor(self, "publisher", "publisher")
        self.participants = [Actor(self, "participant", f"participant{i}") for i in (1, 2)]
        self.logged = 0
        self.acknowledged: set[int] = set()
        self.told: dict[str, str] = {}

    @classmethod
    @asynccontextmanager
    async def staged(cls, directory: Path) -> AsyncIterator["Drama"]:
        drama = cls(directory)
        actors = [drama.publisher, *drama.participants]
        try:
            await drama.cluster.start()
            await asyncio.gather(*(actor.start() for actor in actors))
            yield drama
        finally:
            for actor in actors:
                if hasattr(actor, "process"):
                    await actor.kill()
            await drama.cluster.stop()

    async def act(self, step: str, victim: str, blow: signal.Signals) -> None:
        """One transaction, one blow at that step, and the return of whoever was hit."""
        await until(self._assembled, 60)
        first = self.participants[0]
        log = self.cluster.directory / "b1.log"
        place = log.stat().st_size
        if step != "decided":
            first.tell("hold", step)
            await first.heard("holding")
        first.said.clear()
        self._write_to_log(3)
        self.publisher.tell("run")
        if step == "decided":
            await until(lambda: b'"text":"committed"' in log.read_bytes()[place:], 60)
        else:
            await first.heard(step)
        await self._hit(victim, blow)
        for participant in self.participants:
            participant.tell("go")
        await self.settled()

    async def _assembled(self) -> bool:
        """Everybody is connected and subscribed."""
        topology = await self.cluster.get("b1", "/v1/topology")
        subscriptions = await self.cluster.get("b1", "/v1/subscriptions")
        if topology is None or subscriptions is None:
            return False
        connected = {link["peer"] for link in topology["links"] if link["connected"]}
        subscribed = {s["site"] for s in subscriptions["sites"]}
        names = {p.name for p in self.participants}
        return names <= subscribed and names | {self.publisher.name} <= connected

    def _write_to_log(self, number: int) -> None:
        for _ in range(number):
            self.logged += 1
            self.publisher.tell("log", str(self.logged))

    async def _hit(self, victim: str, blow: signal.Signals) -> None:
        self._note()
        actor = {"publisher": self.publisher, "participant": self.participants[0]}.get(victim)
        process = self.cluster.processes["b1"] if actor is None else actor.process
        os.kill(process.pid, blow)
        if blow is signal.SIGSTOP:
            await asyncio.sleep(PAUSE_S)  # the fault itself: a process that is away for a while
            os.kill(process.pid, signal.SIGCONT)
        elif actor is None:
            await self.cluster.processes["b1"].wait()
            await self.cluster.start("b1")
        else:
            await actor.kill()
            self._note()
            await actor.start()

    def _note(self) -> None:
        self.acknowledged |= {said["id"] for said in self.publisher.all("logged")}
        self.told.update({said["tx"]: said["outcome"] for said in self.publisher.all("outcome") if said["tx"]})

    async def settled(self) -> None:
        """Nothing is under way and nothing is promised; then look at what there is."""

        async def quiet() -> bool:
            under_way = await self.cluster.get("b1", "/v1/transactions")
            if under_way is None or [t for t in under_way if t["state"] != "committed"]:
                return False
            return all([(await p.status())["open"] == 0 for p in self.participants])

        await until(quiet, 90)
        self._note()
        await self.check()

    async def check(self) -> None:
        async def agree() -> bool:
            one, two = [(await p.status())["committed"] for p in self.participants]
            return one.keys() == two.keys()

        await until(agree, 60)
        committed = (await self.participants[0].status())["committed"]
        for participant in self.participants:
            for tx, events in (await participant.status())["committed"].items():
                assert events == [0, 1, 2], f"{participant.name} committed {tx} with {events}"
        for tx, outcome in self.told.items():
            if outcome == "committed":
                assert tx in committed, f"{tx} was told to be committed"
            elif outcome in ("TransactionAborted", "CensusUnfulfilled"):
                assert tx not in committed, f"{tx} was told to be aborted"

    async def check_the_log(self) -> None:
        """Every acknowledged event is there, each once and in the order of its publisher."""
        self._note()
        reader = Recorder()
        async with self.cluster.site("auditor") as site:
            durable = EventType(self.types[1], {"id": int}, durable=True)
            await site.subscribe(durable, participant=reader, durable="auditor", start="oldest")
            await until(lambda: self.acknowledged <= set(reader.ids()), 60)
        assert sorted(set(reader.ids())) == sorted(reader.ids())
        assert [e.number for e in reader.ordinary] == sorted({e.number for e in reader.ordinary if e.number})

    async def check_the_answers(self) -> None:
        """Whoever asks later hears what happened."""
        committed = (await self.participants[0].status())["committed"]
        async with self.cluster.site("asker") as site:
            orders = EventType(self.types[0], {"id": int})
            for tx in list(committed)[-20:]:
                assert (await site.ask_outcome(tx, orders)).outcome is Outcome.COMMITTED


@pytest.mark.timeout(400)
async def test_a_blow_at_each_step_leaves_no_doubt_and_loses_nothing(tmp_path: Path) -> None:
    async with Drama.staged(tmp_path) as drama:
        for step, victim, blow in SAMPLE:
            await drama.act(step, victim, blow)

        await drama.check_the_log()
        await drama.check_the_answers()


@pytest.mark.long
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("round_", range(7))
async def test_thirty_blows_in_every_combination_leave_no_doubt(tmp_path: Path, round_: int) -> None:
    async with Drama.staged(tmp_path) as drama:
        for step, victim, blow in itertools.product(STEPS, VICTIMS, (signal.SIGKILL, signal.SIGSTOP)):
            await drama.act(step, victim, blow)

        await drama.check_the_log()
        await drama.check_the_answers()
