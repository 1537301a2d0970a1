"""Runs one benchmark by name and leaves its record, its pictures and its page behind."""

import inspect
import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from bench.harness import say
from bench.report.page import write_page
from bench.report.plots import draw
from bench.report.table import print_table
from bench.results import Result, write_json
from tops.model.errors import ConfigError


def run(name: str, *, quick: bool, profile: bool, as_json: bool, directory: Path, figures: Sequence[str] = ()) -> None:
    """`bench.NAME:run(quick)`, shown on standard output and written to `directory`.

    `figures`: measure these alone. Raises `ConfigError` for a benchmark that does not exist here or does not take the
    option.
    """
    if find_spec(f"bench.{name}") is None:
        raise ConfigError(f"there is no benchmark {name!r} in this version: bench.{name} does not exist")
    measure = import_module(f"bench.{name}").run
    options: dict[str, Any] = {"profile": True} if profile else {}
    if profile and "profile" not in inspect.signature(measure).parameters:
        raise ConfigError(f"benchmark {name!r} reports no phases: run it without --profile")
    if figures:
        if "figures" not in inspect.signature(measure).parameters:
            raise ConfigError(f"benchmark {name!r} can't be run for some figures alone: run it without --figures")
        options["figures"] = figures
    with _ended_in_order():
        record: Result = measure(quick=quick, **options)
    show(record, as_json=as_json, directory=directory)


def show(record: Result, *, as_json: bool, directory: Path) -> None:
    """Write the record with its pictures and page to `directory`, and show it on standard output."""
    keep(record, directory)
    if as_json:
        print(json.dumps(record, indent=2))
    else:
        print_table(record)


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Told to end, a benchmark ends what it has started, as it does when it is interrupted."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        handler = signal.getsignal(signal.SIGINT)  # while a loop runs, its own
        if callable(handler):
            handler(number, frame)

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job: a loop would not take it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    former = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def keep(record: Result, directory: Path) -> None:
    """JSON first: pictures can be drawn again from it."""
    say(f"wrote {write_json(record, directory)}")
    pictures = draw(record, directory)
    say(f"wrote {write_page(record, pictures, directory)} and {len(pictures)} pictures")
