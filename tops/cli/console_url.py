"""`tops console-url`: a one-time address with which a browser opens a session at a broker without keys."""

from typing import Annotated

import typer

from tops.http.client import console_address
from tops.model.errors import ConfigError


def console_url(
    url: Annotated[str, typer.Option("--url", help="The broker's ws:// address.")] = "ws://127.0.0.1:7420",
) -> None:
    """Print an address that a browser can open once, within ten minutes, for a session of twelve hours."""
    if not url.startswith("ws:"):
        raise ConfigError(f"{url}: with keys a browser needs its own client certificate, made by `tops keys issue`")
    typer.echo(str(console_address(url)))
