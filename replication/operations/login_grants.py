"""The logins of a set's replicas as a DBA makes them: what to run in each database, and what to write in the file."""

from collections.abc import Iterator

from adapters.postgres.access.grants import Need, sections
from adapters.postgres.sql.logins import Roles, database_of, user_of
from replication.model.config import ReplicaConfig, ReplicaSetConfig

_MARKS = {
    Need.ALWAYS: ("", ""),
    Need.COPIES: ("FOR COPIES AND SCHEMA FILES ONLY. ", "-- END OF WHAT IS FOR COPIES AND SCHEMA FILES."),
    Need.HARDENING: ("OPTIONAL. ", "-- END OF WHAT IS OPTIONAL."),
}


def roles_of(config: ReplicaSetConfig, replica: ReplicaConfig) -> Roles:
    """The roles that the file names; those that it does not name get the names that a new database would give them."""
    dsn = replica.dsn or ""
    named = Roles.named_for(database_of(dsn), config.name)
    if replica.read_dsn is None or replica.write_dsn is None:
        return named  # all of them are to be made: what the file has so far is somebody else's
    check = user_of(replica.check_dsn) if replica.check_dsn is not None else named.check
    return Roles(named.owner, user_of(dsn), user_of(replica.read_dsn), user_of(replica.write_dsn), check)


def grants_text(config: ReplicaSetConfig) -> Iterator[str]:
    """The SQL of all replicas with a server of their own, line by line."""
    given = [r for r in config.replica if r.dsn is not None and not r.dsn.startswith("sqlite:")]
    if not given:
        yield "-- every replica has an embedded server, which makes its logins itself"
    for replica in given:
        database = database_of(replica.dsn or "")
        roles = roles_of(config, replica)
        yield f"-- Replica {config.name}/{replica.name}: run this in its database {database!r} as a superuser."
        for section in sections(roles, database, config.tables, config.temp_file_limit):
            yield ""
            begin, end = _MARKS[section.need]
            yield f"-- {begin}{section.title}."
            yield from (f"{statement.strip()};" for statement in section.statements)
            if end:
                yield end
        yield ""
        yield "-- Then give the logins passwords (psql: \\password NAME), and name them in the file:"
        users = {"dsn": roles.agent, "read_dsn": roles.read, "write_dsn": roles.write, "check_dsn": roles.check}
        yield from (f'--   {key} = "postgresql://{user}:…@…/{database}"' for key, user in users.items())
        yield ""
