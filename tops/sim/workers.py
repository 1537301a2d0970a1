"""Distributes work to processes: results in the order of the jobs, and no waiting for a worker that has ended."""

import multiprocessing
from collections import deque
from collections.abc import Callable, Generator, Iterable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Generic, TypeVar

from tops.model.errors import TopsError

STOP_CHECK_S = 0.1  # how soon `stopped` is noticed

Job = TypeVar("Job")
Result = TypeVar("Result")


class WorkerDied(TopsError):
    """A process ended before its job: it was killed, or ran out of memory."""


class _Worker(Generic[Job, Result]):
    """One process, which does one job at a time."""

    def __init__(self, work: Callable[[Job], Result], begin: Callable[[], None]) -> None:
        self.line, its_end = multiprocessing.Pipe()
        self.process: BaseProcess = multiprocessing.Process(target=_serve, args=(its_end, work, begin), daemon=True)
        self.process.start()
        its_end.close()

    def give(self, job: Job) -> None:
        try:
            self.line.send(job)
        except OSError:
            raise self._death() from None

    def result(self) -> Result:
        try:
            result: Result = self.line.recv()
        except (EOFError, OSError):
            raise self._death() from None
        return result

    def _death(self) -> WorkerDied:
        self.process.join()
        problem = f"process {self.process.pid} ended with code {self.process.exitcode} before its job was done: "
        return WorkerDied(problem + "it was killed, or the memory is full")

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.line.close()


def in_order(
    work: Callable[[Job], Result],
    jobs: Iterable[Job],
    processes: int,
    begin: Callable[[], None],
    stopped: Callable[[], bool],
) -> Generator[Result, None, None]:
    """The result of `work` for each job, in the jobs' order; `begin` runs once in each process.

    Ends early, and drops unfinished jobs, when it is closed or `stopped` returns True. A worker that ends is a
    `WorkerDied`, after the results of the jobs before its own.
    """
    left = iter(enumerate(jobs))
    workers = [_Worker(work, begin) for _ in range(processes)]
    busy: dict[Connection | int, tuple[int, _Worker[Job, Result]]] = {}
    done: dict[int, Result] = {}
    idle, following = deque(workers), 0
    try:
        while not stopped():
            while idle and (job := next(left, None)) is not None:
                worker = idle.popleft()
                worker.give(job[1])
                busy[worker.line] = busy[worker.process.sentinel] = (job[0], worker)
            if not busy:
                return
            ready = wait(list(busy), timeout=STOP_CHECK_S)
            for number, worker in dict(busy[r] for r in ready if r in busy).items():
                done[number] = worker.result()
                del busy[worker.line], busy[worker.process.sentinel]
                idle.append(worker)
            while following in done:
                yield done.pop(following)
                following += 1
    finally:
        for worker in workers:
            worker.end()


def _serve(line: Connection, work: Callable[[Job], Result], begin: Callable[[], None]) -> None:
    begin()
    parent = multiprocessing.parent_process()
    while line in wait([line] if parent is None else [line, parent.sentinel]):  # ends when the parent has ended
        line.send(work(line.recv()))
