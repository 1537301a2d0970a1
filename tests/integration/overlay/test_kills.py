"""Brokers, publishers and participants that are killed or paused at every step of a distributed transaction.

A fault point freezes the broker right before a certain message leaves it, so that the blow falls at that very step.
After each blow everybody is brought back, and then: participants agree, what was told to the publisher is true, every
committed participant has every event once and in order, nothing stays promised, and no acknowledged event is lost.
"""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.integration.overlay.cluster import ROOT, TOPOLOGIES, Cluster, Recorder
from tests.support.polling import eventually
from tops import EventType, Outcome

# Where the broker is frozen when the blow falls: before the frame with the n-th message of a kind leaves it. There are
# two participants, so that every second message to them is half-way.
STEPS = {
    "after the census": "TxBegan 1",
    "after event 1": "TxPublished 3",
    "after event 2": "TxPublished 5",
    "after a prepare": "PrepareEpoch 2",
    "after the decision is journaled": "EpochDecided 1",
    "half-way through telling it": "EpochDecided 2",
    "before the publisher hears the outcome": "TxOutcome 1",
}
VICTIMS = ("broker", "publisher", "participant")
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
PAUSE_S = 3.0  # longer than any heartbeat
ROUNDS = 10  # of 21 kills each; some with as many pauses
PAUSES_EVERY = 5
AT_ONCE = 4
RESULT = Path(__file__).with_name("last_long_run.json")

SAMPLE = [
    ("after the census", "publisher", KILL),
    ("after event 1", "broker", KILL),
    ("after event 2", "participant", KILL),
    ("after a prepare", "broker", KILL),
    ("after a prepare", "participant", KILL),
    ("after the decision is journaled", "broker", KILL),
    ("half-way through telling it", "broker", KILL),
    ("half-way through telling it", "participant", KILL),
    ("before the publisher hears the outcome", "broker", KILL),
    ("after a prepare", "broker", STOP),
    ("half-way through telling it", "participant", STOP),
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
        await eventually(lambda: bool(self.all(step, **having)), timeout_s)
        return self.all(step, **having)[-1]

    async def status(self) -> dict[str, Any]:
        before = len(self.all("status"))
        self.tell("status")
        await eventually(lambda: len(self.all("status")) > before)
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
        self.faults = directory / "faults"
        self.faults.mkdir()
        limits = "[broker.limits]\nheartbeat_s = 1\nsite_grace_s = 1.5"
        points = {"TOPS_FAULT_POINTS": str(self.faults)}
        self.cluster = Cluster(directory, TOPOLOGIES["single"], limits, environment=points)
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
        await eventually(self._assembled, 60)
        (self.faults / "reached").unlink(missing_ok=True)
        (self.faults / "arm").write_text(STEPS[step])
        self._write_to_log(3)
        await self._run_up_to_it()
        await self._hit(await self._chosen(step, victim), blow)
        await self.settled()

    async def _run_up_to_it(self) -> None:
        """A transaction that reaches the armed step. One whose link broke, on a busy machine, may end without: then
        another one."""
        ended = len(self.publisher.all("outcome"))
        self.publisher.tell("run")

        async def reached() -> bool:
            nonlocal ended
            if (self.faults / "reached").exists():
                return True
            if len(self.publisher.all("outcome")) > ended:
                ended += 1
                self.publisher.tell("run")
            return False

        await eventually(reached, 60)

    async def _chosen(self, step: str, victim: str) -> Actor | None:
        """The process that is hit, None for the broker; of the participants the one that the step is about."""
        if victim != "participant":
            return self.publisher if victim == "publisher" else None
        if step != "after a prepare":
            return self.participants[0]

        async def prepared() -> list[Actor]:
            return [p for p in self.participants if (await p.status())["open"]]

        async def has_one() -> bool:
            return bool(await prepared())

        await eventually(has_one, 60)
        return (await prepared())[0]

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

    async def _hit(self, actor: Actor | None, blow: signal.Signals) -> None:
        """The broker is frozen meanwhile, and goes on afterwards."""
        self._note()
        broker = self.cluster.processes["b1"]
        os.kill(broker.pid if actor is None else actor.process.pid, blow)
        if blow is KILL and actor is None:
            await broker.wait()
            await self.cluster.start("b1")
            return
        if actor is not None:
            os.kill(broker.pid, signal.SIGCONT)
        if blow is STOP:
            await asyncio.sleep(PAUSE_S)  # the fault itself: a process that is away for a while
            os.kill(broker.pid if actor is None else actor.process.pid, signal.SIGCONT)
        elif actor is not None:
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

        await eventually(quiet, 90)
        self._note()
        await self.check()

    async def check(self) -> None:
        async def agree() -> bool:
            one, two = [(await p.status())["committed"] for p in self.participants]
            return bool(one.keys() == two.keys())

        await eventually(agree, 60)
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
            await eventually(lambda: self.acknowledged <= set(reader.ids()), 60)
        assert sorted(set(reader.ids())) == sorted(reader.ids())
        assert [e.number for e in reader.ordinary] == sorted({e.number for e in reader.ordinary if e.number})

    async def check_the_answers(self) -> None:
        """Whoever asks later hears what happened."""
        committed = (await self.participants[0].status())["committed"]
        async with self.cluster.site("asker") as site:
            orders = EventType(self.types[0], {"id": int})
            for tx in list(committed)[-20:]:
                assert (await site.get_outcome(tx, orders)).outcome is Outcome.COMMITTED


@pytest.mark.timeout(400)
async def test_a_blow_at_each_step_leaves_no_doubt_and_loses_nothing(tmp_path: Path) -> None:
    async with Drama.staged(tmp_path) as drama:
        for step, victim, blow in SAMPLE:
            await drama.act(step, victim, blow)

        await drama.check_the_log()
        await drama.check_the_answers()


@pytest.mark.long
@pytest.mark.timeout(7000)
async def test_two_hundred_kills_at_every_step_leave_no_doubt_and_lose_nothing(tmp_path: Path) -> None:
    done: Counter[str] = Counter()
    began, result = datetime.now(UTC), "interrupted"
    at_once = asyncio.Semaphore(AT_ONCE)

    async def play(number: int) -> None:
        directory = tmp_path / str(number)
        directory.mkdir()
        async with at_once, Drama.staged(directory) as drama:
            blows = (KILL,) if number % PAUSES_EVERY else (KILL, STOP)
            for step, victim, blow in itertools.product(STEPS, VICTIMS, blows):
                where = f"{blow.name} of the {victim} {step}"
                try:
                    await drama.act(step, victim, blow)
                except Exception as error:
                    error.add_note(f"round {number}: {where}")
                    raise
                done[where] += 1
                print(sum(done.values()), where, flush=True)
            await drama.check_the_log()
            await drama.check_the_answers()

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(ROUNDS):
                group.create_task(play(number))
        result = "passed"
    except BaseExceptionGroup as group_error:
        result = f"failed: {''.join(traceback.format_exception(group_error))}"
        raise
    finally:
        _record(began, done, result)


def _record(began: datetime, done: Counter[str], result: str) -> None:
    """What the last long run did, for whoever reads the repository."""
    found = {
        "began": began.isoformat(timespec="seconds"),
        "minutes": round((datetime.now(UTC) - began).total_seconds() / 60, 1),
        "command": "pytest -m long tests/integration/overlay/test_kills.py",
        "commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True)
        .stdout.decode()
        .strip(),
        "result": result,
        "kills": sum(n for what, n in done.items() if what.startswith("SIGKILL")),
        "pauses": sum(n for what, n in done.items() if what.startswith("SIGSTOP")),
        "blows": dict(sorted(done.items())),
    }
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
