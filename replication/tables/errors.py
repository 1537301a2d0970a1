"""What can go wrong in a check, a report or a repair; each class knows the exit code of the command line."""

from tops.model.errors import ConfigError, Retry, TopsError


class CheckRejected(TopsError):
    """The check can't give an honest answer on this input: no key, different columns, nothing to compare."""


class JavaMissing(ConfigError):
    """Spark runs on Java 17 or newer and none was found."""

    def __init__(self, found: str) -> None:
        self.found = found
        super().__init__(
            f"Spark needs Java 17 or newer, but {found}; install one (Debian: apt-get install openjdk-17-jre-headless) "
            "or point JAVA_HOME at it"
        )


class AlreadyRunning(TopsError):
    """Another check holds this folder: two checks of one set at once would mix their results."""

    retry = Retry.SAFE

    def __init__(self, folder: str) -> None:
        self.folder = folder
        super().__init__(f"another check is writing to {folder}: wait for it, or choose another folder with --out")


class SnapshotLost(TopsError):
    """A replica's snapshot is gone (its server restarted, or the holder was cut off); resume takes a new one."""

    retry = Retry.SAFE


class NeedsForce(TopsError):
    """A plan would delete or overwrite what acknowledged transactions wrote, and nobody has said that it may."""

    def __init__(self, rows: int, example: str) -> None:
        self.rows, self.example = rows, example
        super().__init__(
            f"the plan would delete or overwrite {rows:,} row(s) that acknowledged transactions wrote or may have "
            f"written, for example {example}; nothing was written; plan with --by log, which keeps such rows, or add "
            "--force if they are to be lost"
        )


class RowMoved(TopsError):
    """A row is no longer what the check saw; the repair of its batch was rolled back as a whole."""

    retry = Retry.SAFE

    def __init__(self, replica: str, table: str, key: tuple[str, ...]) -> None:
        self.replica, self.table, self.key = replica, table, key
        super().__init__(
            f"{replica}: row {', '.join(key)} of {table} changed since the check; its batch was left alone: check again"
        )
