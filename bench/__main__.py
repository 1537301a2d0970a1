"""`python -m bench NAME`: the same as `tops bench NAME`."""

from bench.cli import app

app(prog_name="python -m bench")
