"""An inventory with two warehouses that both write, also while they can't reach each other.

Counting is done with increments, which never conflict; the description of an article is decided by the last writer,
and the version that lost is in the conflict log.

    python -m examples.inventory
"""

import asyncio

from examples.local_cluster import local_cluster
from replication import connect

SCHEMA = (
    "create table stock (article text primary key, pieces bigint not null default 0, note text not null default '');"
)


async def main() -> tuple[int, int]:
    async with (
        local_cluster("inventory", 'policy = "peer-to-peer"', SCHEMA, replicas=2) as cluster,
        connect(cluster.urls(), "inventory", prefer="r1") as north,
        connect(cluster.urls(), "inventory", prefer="r2") as south,
    ):
        async with north.transaction() as tx:
            await tx.insert("stock", {"article": "lamp", "pieces": 0})
        await north.wait_in_sync()

        async def work(site: object, name: str) -> None:
            for count in range(1, 26):
                async with site.transaction() as tx:  # type: ignore[attr-defined]
                    await tx.update("stock", key={"article": "lamp"}, add={"pieces": 1})
                    await tx.update("stock", key={"article": "lamp"}, values={"note": f"counted {count} in the {name}"})

        await asyncio.gather(work(north, "north"), work(south, "south"))
        await north.wait_in_sync()
        rows = [await site.fetchrow("select pieces, note from stock") for site in (north, south)]
        assert rows[0] == rows[1]
        assert rows[0] is not None
        conflicts = sum(len(lines) for lines in (await north.conflicts(1000)).values())
        print(f"both warehouses say: {rows[0]['pieces']} lamps, {rows[0]['note']!r}; {conflicts} conflicts in the log")
        return int(rows[0]["pieces"]), conflicts


if __name__ == "__main__":
    assert asyncio.run(main())[0] == 50
