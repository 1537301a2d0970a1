"""The processes of a cluster, each with its own life: brokers and replica agents, started, killed, waited for.

`tops up` and the demo use it, and so do tests that need real processes to kill.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from replication.model.config import Cluster
from tops.model.errors import NotReachable

STOP_PATIENCE_S = 20.0
GATEWAY = "gateway//"  # begins the names of gateways among the parts: no set and replica are named so


class Processes:
    """Starts `tops` processes for the parts that a file names; their output goes to files, or to ours.

    `module` is what takes the place of `tops` as the program, with the same command line; `environment` is added to
    ours, `replica_options` to the commands of replicas.
    """

    def __init__(
        self,
        cluster: Cluster,
        logs: Path | None = None,
        log_level: str = "info",
        *,
        module: str = "tops",
        environment: Mapping[str, str] | None = None,
        replica_options: Sequence[str] = (),
    ) -> None:
        self.cluster, self._logs, self._log_level = cluster, logs, log_level
        self._module, self._environment = module, dict(environment or {})
        self._replica_options = replica_options
        self._running: dict[str, asyncio.subprocess.Process] = {}

    @property
    def parts(self) -> list[str]:
        """Every part of the file: `broker/NAME`, `SET/NAME` and `gateway//NAME`."""
        brokers = [f"broker/{b.name}" for b in self.cluster.config.broker]
        replicas = [f"{s.name}/{r.name}" for s in self.cluster.replica_sets for r in s.replica]
        return [*brokers, *replicas, *(f"{GATEWAY}{g.name}" for g in self.cluster.gateways)]

    async def start_all(self) -> None:
        await asyncio.gather(*(self.start(part) for part in self.parts))

    async def start(self, part: str) -> None:
        kind, _, name = part.partition("/")
        command = ["replica", "run", "--name", part, *self._replica_options]
        if part.startswith(GATEWAY):
            command = ["gateway", "run", "--name", part.removeprefix(GATEWAY)]
        elif kind == "broker":
            command = ["broker", "run", "--name", name]
        path = str(self.cluster.path.absolute())
        arguments = [*command, "-c", path, "--log-level", self._log_level]
        output = None
        if self._logs is not None:
            self._logs.mkdir(parents=True, exist_ok=True)
            output = (self._logs / f"{part.replace('/', '-')}.log").open("ab")
        self._running[part] = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self._module,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **self._environment, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            start_new_session=True,  # Ctrl-C is for us; we end the others in our own order
        )
        if output is not None:
            output.close()

    def pid(self, part: str) -> int:
        return self._running[part].pid

    async def kill(self, part: str) -> None:
        """`kill -9`, as a fault would."""
        process = self._running.pop(part)
        process.kill()
        await process.wait()

    def signal(self, part: str, number: signal.Signals) -> None:
        """Send it a signal: stopped (`SIGSTOP`), it is there and does not answer until it may go on (`SIGCONT`)."""
        self._running[part].send_signal(number)

    async def stop(self, part: str) -> None:
        process = self._running.pop(part, None)
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_PATIENCE_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    async def stop_all(self) -> None:
        """Gateways first, then agents, so that they can take leave; then the brokers."""
        await asyncio.gather(*(self.stop(part) for part in list(self._running) if part.startswith(GATEWAY)))
        replicas = [part for part in self._running if not part.startswith("broker/")]
        await asyncio.gather(*(self.stop(part) for part in replicas))
        await asyncio.gather(*(self.stop(part) for part in list(self._running)))

    async def first_end(self) -> tuple[str, int]:
        """Wait until one of the processes ends by itself; which one, and with which code."""
        waits = {asyncio.ensure_future(process.wait()): part for part, process in self._running.items()}
        done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        task = next(iter(done))
        return waits[task], task.result()

    @property
    def running(self) -> list[str]:
        """Parts that have not been stopped or dropped."""
        return list(self._running)

    def drop(self, part: str) -> None:
        """Do without a part that has ended."""
        del self._running[part]

    def check(self) -> None:
        """Raise if a process that should run has ended."""
        for part, process in self._running.items():
            if process.returncode is not None:
                raise NotReachable(f"{part} ended with code {process.returncode}{self._tail(part)}")

    def _tail(self, part: str) -> str:
        if self._logs is None:
            return ""
        text = (self._logs / f"{part.replace('/', '-')}.log").read_text(errors="replace")
        return f"; its log ends:\n{text[-2000:]}"


async def wait_ready(
    cluster: Cluster, names: Sequence[str], processes: Processes, timeout_s: float = 60.0, keys: Path | None = None
) -> None:
    """Returns when all replicas of these sets are in sync."""
    from replication.client.replica_set import connect_by_file

    for name in names:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            processes.check()
            try:
                async with connect_by_file(cluster, name, keys=keys, timeout_s=2.0) as replica_set:
                    await replica_set.wait_in_sync(max(1.0, deadline - asyncio.get_running_loop().time()))
                    break
            except NotReachable:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(0.1)
