"""Histories of list-append transactions, and a search for the cycles that a serial order can't have.

Every write appends a unique value to a list that its transaction has read. So each version of a key names the one it
was made from, and who read what is plain. Dependencies between committed transactions: ww (the next version), wr (read
that version), rw (read the version before). A cycle of ww is G0, with wr G1c, with one rw G-single, with more G2.
"""

from collections import defaultdict
from dataclasses import dataclass, field

Version = tuple[str, ...]


@dataclass
class Tx:
    name: str
    committed: bool | None = None  # None: unknown
    reads: list[tuple[int, Version]] = field(default_factory=list)
    writes: dict[int, Version] = field(default_factory=dict)  # key -> the whole list afterwards
    middle: list[Version] = field(default_factory=list)  # lists that it wrote and overwrote itself


def anomalies(history: list[Tx]) -> list[str]:
    """What can't be in a serializable history; unknown transactions count as committed if somebody saw their writes."""
    seen = {(key, version) for tx in history if tx.committed for key, version in tx.reads}
    for tx in history:
        if tx.committed is None:
            tx.committed = any((key, version) in seen for key, version in tx.writes.items())
    committed = [tx for tx in history if tx.committed]
    found = _dirty_reads(history, committed)
    found += _lost_updates(committed)
    return found + _cycles(committed)


def _dirty_reads(history: list[Tx], committed: list[Tx]) -> list[str]:
    aborted = {version[-1]: tx.name for tx in history if tx.committed is False for version in tx.writes.values()}
    middle = {version[-1]: tx.name for tx in committed for version in tx.middle}
    found = []
    for tx in committed:
        for key, version in tx.reads:
            for value in version:
                if value in aborted:
                    found.append(f"G1a: {tx.name} read {value} of aborted {aborted[value]} in key {key}")
            if version and version[-1] in middle and middle[version[-1]] != tx.name:
                found.append(f"G1b: {tx.name} read {version[-1]}, which {middle[version[-1]]} overwrote")
    return found


def _lost_updates(committed: list[Tx]) -> list[str]:
    made_from: dict[tuple[int, Version], list[str]] = defaultdict(list)
    for tx in committed:
        for key, version in tx.writes.items():
            made_from[key, version[:-1]].append(tx.name)
    return [
        f"G-single (lost update): {', '.join(names)} all follow {version[-1:]} of key {key}"
        for (key, version), names in made_from.items()
        if len(names) > 1
    ]


def _cycles(committed: list[Tx]) -> list[str]:
    writer = {(key, version): tx.name for tx in committed for key, version in tx.writes.items()}
    following = {(key, version[:-1]): tx.name for tx in committed for key, version in tx.writes.items()}
    edges: dict[str, dict[str, str]] = defaultdict(dict)
    for tx in committed:
        for key, version in tx.writes.items():
            _add(edges, writer.get((key, version[:-1])), tx.name, "ww")
        for key, version in tx.reads:
            _add(edges, writer.get((key, version)), tx.name, "wr")
            _add(edges, tx.name, following.get((key, version)), "rw")
    return [_named(component, edges) for component in _components(edges) if len(component) > 1]


def _add(edges: dict[str, dict[str, str]], one: str | None, other: str | None, kind: str) -> None:
    if one is not None and other is not None and one != other and edges[one].get(other) != "ww":
        edges[one][other] = kind if edges[one].get(other) != "wr" or kind == "ww" else "wr"


def _named(component: list[str], edges: dict[str, dict[str, str]]) -> str:
    """The worst that the component holds: a cycle of fewer kinds of dependencies is the worse one."""
    inside = set(component)
    kept = {one: {other: kind for other, kind in edges[one].items() if other in inside} for one in component}
    return f"{_worst(kept)}: a cycle among {', '.join(sorted(component)[:10])}"


def _worst(edges: dict[str, dict[str, str]]) -> str:
    if _has_cycle(edges, {"ww"}):
        return "G0"
    if _has_cycle(edges, {"ww", "wr"}):
        return "G1c"
    anti = [(one, other) for one, successors in edges.items() for other, kind in successors.items() if kind == "rw"]
    return "G-single" if any(_reaches(edges, other, one) for one, other in anti) else "G2"


def _has_cycle(edges: dict[str, dict[str, str]], kinds: set[str]) -> bool:
    kept = defaultdict(dict, {one: {o: k for o, k in to.items() if k in kinds} for one, to in edges.items()})
    return any(len(component) > 1 for component in _components(kept))


def _reaches(edges: dict[str, dict[str, str]], start: str, goal: str) -> bool:
    """Whether ww and wr alone lead from one transaction to the other."""
    todo, seen = [start], {start}
    while todo:
        one = todo.pop()
        if one == goal:
            return True
        fresh = [other for other, kind in edges[one].items() if kind != "rw" and other not in seen]
        seen.update(fresh)
        todo += fresh
    return False


def _components(edges: dict[str, dict[str, str]]) -> list[list[str]]:
    """Tarjan's strongly connected components, without recursion."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    components: list[list[str]] = []
    for root in list(edges):
        if root in index:
            continue
        work = [(root, iter(edges[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, successors = work[-1]
            for successor in successors:
                if successor not in index:
                    index[successor] = low[successor] = len(index)
                    stack.append(successor)
                    on_stack.add(successor)
                    work.append((successor, iter(edges.get(successor, {}))))
                    break
                if successor in on_stack:
                    low[node] = min(low[node], index[successor])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = []
                    while True:
                        member = stack.pop()
                        on_stack.discard(member)
                        component.append(member)
                        if member == node:
                            break
                    components.append(component)
    return components
