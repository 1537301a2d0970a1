"""Kills parts of the running stack, one after the other, and shows what becomes of the writes: `make compose-demo`.

It needs the standard library and `docker compose`. What it does to the stack goes through `Stack`, so that tests run it
without containers.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

FILE = Path(__file__).with_name("compose.yaml")
BROKERS = ("b1", "b2", "b3")
DOWN_S = 15.0
FLOW_S = 60.0  # at most, until writes go on without a part, or when it is back
POLL_S = 0.2
BALANCES = 20_000
Say = Callable[[str], None]


class Stack(Protocol):
    """What the demo does to a stack; parts are named as the services of the compose file."""

    def kill(self, part: str) -> None: ...

    def start(self, part: str) -> None: ...

    def owner(self) -> str:
        """The broker that coordinates the set."""

    def compare(self) -> dict[str, list[int]]:
        """For each replica, once all are in sync: how many transfers it has, and the sum of all balances."""

    def begin_load(self) -> None: ...

    def tally(self) -> dict[str, int]:
        """What became of the writes so far; after `end_load`, of all."""

    def end_load(self) -> None: ...


@dataclass(frozen=True)
class Step:
    """A part that is killed, and whether writes go on without it."""

    part: str
    what: str
    writes_go_on: bool


def steps(owner: str) -> list[Step]:
    other = next(broker for broker in reversed(BROKERS) if broker != owner)
    return [
        Step("r3", "the agent of replica r3", writes_go_on=True),
        Step("pg2", "the database server of replica r2", writes_go_on=True),
        Step(other, f"broker {other}", writes_go_on=True),
        Step(owner, f"broker {owner}, which coordinates the set", writes_go_on=False),
    ]


def demonstrate(stack: Stack, say: Say, down_s: float = DOWN_S) -> bool:
    """True if every step went as it is promised, and all replicas are equal in the end."""
    before = _transfers(stack.compare())
    stack.begin_load()
    went_well = True
    try:
        _first_acknowledged(stack)
        for step in steps(stack.owner()):
            went_well &= _carry_out(stack, step, say, down_s)
    finally:
        stack.end_load()
    return _check(stack, before, say) and went_well


def _carry_out(stack: Stack, step: Step, say: Say, down_s: float) -> bool:
    say(f"{step.what} is killed")
    stack.kill(step.part)
    time.sleep(down_s / 3)  # what was under way is decided
    former, began = stack.tally(), time.monotonic()
    if step.writes_go_on:
        flow = _first_acknowledged(stack)  # at latest when the others have noticed who is gone
        say(f"  writes go on after {down_s / 3 + flow:.1f} s")
    time.sleep(down_s * 2 / 3)
    tally, took = stack.tally(), time.monotonic() - began
    acknowledged, rejected = (tally[key] - former[key] for key in ("acknowledged", "rejected"))
    say(f"  meanwhile {acknowledged} writes acknowledged ({acknowledged / took:.0f} per s), {rejected} rejected")
    stack.start(step.part)
    say(f"  it is started; writes are acknowledged {_first_acknowledged(stack):.1f} s later")
    if acknowledged and not step.writes_go_on:
        say("  WRONG: nobody could decide about these writes")
        return False
    return True


def _first_acknowledged(stack: Stack) -> float:
    """Returns when a write has been acknowledged, after how many seconds."""
    former, began = stack.tally()["acknowledged"], time.monotonic()
    while stack.tally()["acknowledged"] <= former:
        if time.monotonic() - began > FLOW_S:
            raise SystemExit(f"WRONG: no write was acknowledged for {FLOW_S:.0f} s")
        time.sleep(POLL_S)
    return time.monotonic() - began


def _check(stack: Stack, before: int, say: Say) -> bool:
    """No acknowledged write is lost, none is there twice, and all replicas have the same."""
    tally, found = stack.tally(), stack.compare()
    written = _transfers(found) - before
    kept = tally["acknowledged"] <= written <= tally["acknowledged"] + tally["unknown"]
    equal = len({tuple(row) for row in found.values()}) == 1
    balanced = all(balances == BALANCES for _, balances in found.values())
    say(f"{tally['acknowledged']} writes acknowledged, {tally['rejected']} rejected, {tally['unknown']} unknown")
    say(f"{written} are in the databases; replicas are {'equal' if equal else 'DIFFERENT'}")
    if not kept or not balanced:
        say("WRONG: writes were lost or done twice")
    return kept and equal and balanced


def _transfers(found: dict[str, list[int]]) -> int:
    return max(transfers for transfers, _ in found.values())


class ComposeStack:
    """The stack that `make compose-up` has started."""

    def __init__(self, project: str = "tops") -> None:
        self._compose = ["docker", "compose", "-p", project, "-f", str(FILE)]
        self._tally = {"acknowledged": 0, "rejected": 0, "unknown": 0}
        self._reader: threading.Thread | None = None

    def kill(self, part: str) -> None:
        self._run("kill", part)

    def start(self, part: str) -> None:
        self._run("start", part)

    def owner(self) -> str:
        return self._load("owner").strip()

    def compare(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = json.loads(self._load("compare"))
        return found

    def begin_load(self) -> None:
        self._run("--profile", "demo", "up", "--detach", "--no-deps", "--force-recreate", "load")
        logs = subprocess.Popen(
            [*self._compose, "logs", "--follow", "--no-log-prefix", "load"], stdout=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._follow, args=(logs,), daemon=True)
        self._reader.start()

    def _follow(self, logs: "subprocess.Popen[str]") -> None:
        assert logs.stdout is not None
        for line in logs.stdout:
            if line.startswith("{"):
                told = json.loads(line)
                self._tally = {key: told[key] for key in self._tally}

    def tally(self) -> dict[str, int]:
        return self._tally

    def end_load(self) -> None:
        self._run("--profile", "demo", "stop", "load")
        if self._reader is not None:
            self._reader.join(timeout=30)

    def _load(self, step: str) -> str:
        return self._run("--profile", "demo", "run", "--rm", "--no-deps", "-T", "load", step)

    def _run(self, *arguments: str) -> str:
        done = subprocess.run([*self._compose, *arguments], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"docker compose {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout


def main() -> None:
    sys.exit(0 if demonstrate(ComposeStack(), lambda line: print(line, flush=True)) else 1)


if __name__ == "__main__":
    main()
