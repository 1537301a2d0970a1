"""What the proof takes for granted beyond a session's settings: replicas that differ here may read one statement in two
ways."""

import hashlib

import asyncpg
import msgspec

_SERVER = """
select current_setting('server_version_num')::int / 10000 as major, pg_encoding_to_char(d.encoding) as encoding,
       format('%s/%s/%s', d.datlocprovider, d.datcollate, d.datctype) as locale,
       coalesce(pg_database_collation_actual_version(d.oid), '') as locale_version
  from pg_database d where d.datname = current_database()
"""
# Collations that columns and indexes of users' tables use, with the version of the library that is installed.
_COLLATIONS = """
select distinct c.collname as name, coalesce(pg_collation_actual_version(c.oid), '') as version
  from pg_attribute a join pg_class t on t.oid = a.attrelid join pg_namespace n on n.oid = t.relnamespace
  join pg_collation c on c.oid = a.attcollation
 where a.attnum > 0 and not a.attisdropped and n.nspname !~ '^pg_' and n.nspname not in ('information_schema', 'tops')
   and c.collname not in ('default', 'C', 'POSIX') order by 1
"""
# No function tells the version of the time zone data: its effect does, at instants before and after known changes.
_ZONES = """
select string_agg(concat(z.name, ' ', (i.instant at time zone z.name)::text), ',' order by z.name, i.instant) as offsets
  from pg_timezone_names z
 cross join unnest(array['1990-01-15 00:00+00', '2010-07-15 00:00+00', '2022-11-15 00:00+00', '2030-07-15 00:00+00']
                   ::timestamptz[]) as i(instant)
 where z.name !~ '^posix'
"""


class Fingerprint(msgspec.Struct, frozen=True):
    """Equal for servers on which proved statements have equal results."""

    major: int
    encoding: str
    locale: str  # provider, collation and character classes of the database
    locale_version: str
    collations: tuple[tuple[str, str], ...]  # name and version of those that tables use
    time_zones: str  # a digest of what the time zone data says

    def differences(self, other: "Fingerprint") -> list[str]:
        """What is not equal, as `field: this, that`."""
        return [
            f"{name}: {getattr(self, name)}, {getattr(other, name)}"
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(other, name)
        ]


async def fingerprint(connection: "asyncpg.Connection[asyncpg.Record]") -> Fingerprint:
    server = await connection.fetchrow(_SERVER)
    assert server is not None
    collations = await connection.fetch(_COLLATIONS)
    offsets = await connection.fetchval(_ZONES) or ""
    return Fingerprint(
        major=server["major"],
        encoding=server["encoding"],
        locale=server["locale"],
        locale_version=server["locale_version"],
        collations=tuple((row["name"], row["version"]) for row in collations),
        time_zones=hashlib.sha256(offsets.encode()).hexdigest()[:16],
    )
