"""A web shop that reads much and writes little: writes go to the primary, reads to any replica that is fresh enough.

A customer who has just ordered sees the order at once, wherever the next page is read: the write's token says so.

    python -m examples.web_shop
"""

import asyncio

from examples.local_cluster import local_cluster
from replication import connect

SCHEMA = """
create table products (id int primary key, name text not null, price numeric(10, 2) not null);
create table orders (id int primary key, product int not null references products, pieces int not null);
"""


async def main() -> dict[str, int]:
    served: dict[str, int] = {}
    async with (
        local_cluster("shop", 'policy = "primary-site"\nprimary = "r1"', SCHEMA) as cluster,
        connect(cluster.urls(), "shop") as shop,
    ):
        async with shop.transaction() as tx:
            for number in range(20):
                await tx.insert("products", {"id": number, "name": f"product {number}", "price": f"{number}.99"})

        async def customer(number: int) -> None:
            replica = shop.config.names[number % 3]
            await shop.fetch("select name, price from products order by price", max_lag=5.0, replica=replica)
            async with shop.transaction() as tx:
                await tx.insert("orders", {"id": number, "product": number % 20, "pieces": 1})
            assert tx.result is not None
            mine = await shop.fetchrow(
                "select product from orders where id = $1", number, after=tx.result.token, replica=replica
            )
            assert mine is not None, "the customer does not see the order"
            served[replica] = served.get(replica, 0) + 1

        await asyncio.gather(*(customer(number) for number in range(60)))
    print(f"60 customers saw their orders; pages were served by {served}")
    return served


if __name__ == "__main__":
    assert sum(asyncio.run(main()).values()) == 60
