"""Numbers, with the commands that repeat them: one module per subcommand of `tops bench`."""
