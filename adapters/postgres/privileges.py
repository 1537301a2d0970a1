"""What a login may do beyond what replication needs."""

from dataclasses import dataclass

from adapters.postgres.logins import Logins, user_of
from adapters.postgres.session import Options, connect
from tops.errors import ConfigError

_OPTIONS = Options(lock_timeout_s=5.0, statement_timeout_s=30.0, connect_timeout_s=10.0)
# Who is in one of these can become a superuser by way of the server's files or programs, or by a grant.
_POWERS = """
select r.rolname as role, r.rolsuper as superuser, r.rolcreaterole as makes_roles,
       array(select p.rolname::text from pg_roles p where pg_has_role(r.oid, p.oid, 'member') and p.rolname in
             ('pg_read_server_files', 'pg_write_server_files', 'pg_execute_server_program') order by 1) as reaches
  from pg_roles r where r.rolname = coalesce($1, current_user)
"""
_CAN_BECOME = (
    "select coalesce((select pg_has_role(current_user, oid, 'member') from pg_roles where rolname = $1), false)"
)


@dataclass(frozen=True, slots=True)
class Powers:
    """Why a role could reach the server's files; empty if it could not."""

    role: str
    reason: str


async def powers(dsn: str, where: str, role: str | None = None) -> list[Powers]:
    """How the login of an address, or another role there, could reach the server's files; nothing if it could not."""
    connection = await connect(dsn, where, "tops-privileges", _OPTIONS)
    try:
        rows = await connection.fetch(_POWERS, role)
    finally:
        await connection.close()
    found = []
    for row in rows:
        if row["superuser"]:
            found.append(Powers(row["role"], "is a superuser"))
        elif row["makes_roles"]:
            found.append(Powers(row["role"], "may create roles"))
        elif row["reaches"]:
            found.append(Powers(row["role"], f"is a member of {', '.join(row['reaches'])}"))
    return found


async def check_write_role(logins: Logins, where: str) -> None:
    """The agent must be able to hand a client's statement to the role that may do no more than write."""
    role = user_of(logins.write)
    connection = await connect(logins.agent, where, "tops-privileges", _OPTIONS)
    try:
        if not await connection.fetchval(_CAN_BECOME, role):
            raise ConfigError(f"{where}: the agent's login is no member of the role {role!r} of write_dsn: grant it")
    finally:
        await connection.close()
