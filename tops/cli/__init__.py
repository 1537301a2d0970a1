"""The `tops` command and the groups of this package; other packages add theirs as entry points."""
