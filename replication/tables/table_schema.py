"""One table's schema as lines of text that are equal on two databases exactly if the tables are.

Names of constraints and indexes do not count, nor do dropped columns, storage, or anything of schema `tops`. All names
are qualified: the caller's `search_path` must be `pg_catalog`.
"""

import asyncpg

from adapters.postgres.sql.catalog import GENERATED_BY

_LINES = f"""
with recursive parts as (
    select $1::oid as oid, 0 as depth
    union all select i.inhrelid, depth + 1 from parts join pg_inherits i on i.inhparent = parts.oid
), columns as (
    select a.*, row_number() over (order by a.attnum) as place, t.typtype, t.oid as type_oid, t.typelem,
           pg_get_expr(d.adbin, d.adrelid) as expression
      from pg_attribute a join pg_type t on t.oid = a.atttypid
      left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
     where a.attrelid = $1 and a.attnum > 0 and not a.attisdropped
), types as (
    select distinct t.oid, t.typtype, t.typbasetype, t.typtypmod, t.typnotnull, t.typdefault from columns c
      join pg_type t on t.oid = c.type_oid or (c.typelem <> 0 and t.oid = c.typelem)
), constraints as (
    select pg_get_constraintdef(oid) as definition, contype from pg_constraint where conrelid = $1
)
select 0 as part, 0::bigint as place, concat_ws(' ', 'table', case c.relkind when 'p' then 'partitioned' end,
       case c.relpersistence when 'u' then 'unlogged' when 't' then 'temporary' end,
       case when c.relrowsecurity then 'row security' end, 'replica identity ' || c.relreplident::text) as line
  from pg_class c where c.oid = $1
union all
select 1, place, concat_ws(' ', 'column', quote_ident(attname), format_type(atttypid, atttypmod),
       (select 'collate ' || co.collname from pg_collation co, pg_type t
         where co.oid = attcollation and t.oid = atttypid and attcollation <> t.typcollation),
       case when attnotnull then 'not null' end,
       case attidentity when 'a' then 'identity always' when 'd' then 'identity by default' end,
       case when expression is not null then case when attgenerated <> '' then 'generated ' else 'default ' end end
           || expression)
  from columns
union all
select 2, 0, concat('type ', format_type(oid, null), ' enum ',
       (select string_agg(quote_literal(enumlabel), ', ' order by enumsortorder) from pg_enum where enumtypid = t.oid))
  from types t where typtype = 'e'
union all
select 2, 0, concat_ws(' ', 'type', format_type(oid, null), 'domain', format_type(typbasetype, typtypmod),
       case when typnotnull then 'not null' end, 'default ' || typdefault,
       (select string_agg(checked, ' ' order by checked)
          from (select pg_get_constraintdef(k.oid) as checked from pg_constraint k where contypid = t.oid) as checks))
  from types t where typtype = 'd'
union all
select 3, 0, 'constraint ' || definition from constraints where contype in ('p', 'u', 'x', 'f', 'c')
union all
select 4, 0, 'index ' || regexp_replace(pg_get_indexdef(i.indexrelid), ' INDEX .*? ON ', ' INDEX ON ')
  from pg_index i where i.indrelid = $1 and (i.indisunique or i.indisexclusion)
   and not exists (select from pg_constraint where conindid = i.indexrelid and conrelid = $1)
union all
select 5, 0, concat_ws(' ', 'partition', case depth when 0 then '' else p.oid::regclass::text end,
       pg_get_expr(c.relpartbound, c.oid), 'by ' || pg_get_partkeydef(p.oid))
  from parts p join pg_class c on c.oid = p.oid where c.relispartition and depth > 0 or c.relkind = 'p'
union all
select 6, 0, concat_ws(' ', 'inherits', inhparent::regclass) from pg_inherits i join pg_class c on c.oid = i.inhrelid
 where i.inhrelid = $1 and not c.relispartition
union all
select 7, 0, format('sequence of %I %s start %s increment %s from %s to %s cache %s%s', a.attname,
       format_type(s.seqtypid, null), seqstart, seqincrement, seqmin, seqmax, seqcache,
       case when seqcycle then ' cycle' else '' end)
  from pg_depend d join pg_sequence s on s.seqrelid = d.objid
  join pg_attribute a on a.attrelid = d.refobjid and a.attnum = d.refobjsubid
 where d.refobjid = $1 and d.classid = 'pg_class'::regclass and d.deptype in ('a', 'i')
union all
select 8, 0, concat_ws(' ', 'trigger', pg_get_triggerdef(t.oid), 'enabled ' || tgenabled::text)
  from pg_trigger t join pg_proc f on f.oid = t.tgfoid join pg_namespace n on n.oid = f.pronamespace
 where t.tgrelid = $1 and not t.tgisinternal and n.nspname <> 'tops'
union all
select 9, 0, 'rule ' || pg_get_ruledef(oid) from pg_rewrite where ev_class = $1 and rulename <> '_RETURN'
union all
select 10, 0, concat_ws(' ', 'policy', polname, polcmd::text, pg_get_expr(polqual, polrelid),
       pg_get_expr(polwithcheck, polrelid)) from pg_policy where polrelid = $1
union all
select 11, 0, concat_ws(' ', 'function of column', quote_ident(a.attname), p.oid::regprocedure,
       md5(pg_get_functiondef(p.oid)))
  from columns a, lateral ({GENERATED_BY}) as f join pg_proc p on p.oid = f.oid and p.prokind = 'f'
order by 1, 2, 3
"""


async def schema_lines(connection: asyncpg.Connection, oid: int) -> tuple[str, ...]:
    return tuple([row["line"] for row in await connection.fetch(_LINES, oid)])
