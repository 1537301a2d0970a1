"""`python -m tops` is the `tops` command."""

from tops.cli.main import main

main()
