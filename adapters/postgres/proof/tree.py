"""Reads PostgreSQL's printed node trees: what `debug_print_rewritten` logs and what `pg_node_tree` columns hold.

    {OPEXPR :opno 96 :opfuncid 65 :args ({VAR :varno 1 …} {CONST … :constvalue 4 [ 1 0 0 0 0 0 0 0 ]}) :location 30}

A node is a kind and pairs of field and value; a value is a token, a list in parentheses, a node, or `<>` for none.
Names may hold anything, with a backslash before what would be mistaken for the syntax; taken strictly as pairs, a name
that looks like a field is still read as a value. What does not fit is an error: a tree that is not understood proves
nothing.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Union

_TOKEN = re.compile(r"\s*(?:([(){}])|((?:\\.|[^\s(){}\\])+))", re.DOTALL)

Value = Union[str, "Node", list["Value"], None]


class Unreadable(Exception):
    """The text is not a node tree as this parser knows it."""


@dataclass(frozen=True, slots=True)
class Node:
    kind: str
    fields: dict[str, Value]

    def __getitem__(self, name: str) -> Value:
        try:
            return self.fields[name]
        except KeyError:
            raise Unreadable(f"{self.kind} has no field {name}") from None

    def text(self, name: str) -> str:
        value = self[name]
        if not isinstance(value, str):
            raise Unreadable(f"field {name} of {self.kind} is no token")
        return value

    def number(self, name: str) -> int:
        try:
            return int(self.text(name))
        except ValueError:
            raise Unreadable(f"field {name} of {self.kind} is no number") from None

    def node(self, name: str) -> "Node | None":
        value = self[name]
        if value is not None and not isinstance(value, Node):
            raise Unreadable(f"field {name} of {self.kind} is no node")
        return value

    def nodes(self, name: str) -> "list[Node]":
        value = self[name]
        if value is None:
            return []
        if not isinstance(value, list):
            raise Unreadable(f"field {name} of {self.kind} is no list")
        return nodes_of(value)

    def numbers(self, name: str) -> list[int]:
        """A list of object ids, integers or members of a set, which begins with its kind: `(o 23 25)`."""
        value = self[name]
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise Unreadable(f"field {name} of {self.kind} is no list of numbers")
        try:
            return [int(str(item)) for item in value[1:]]
        except ValueError:
            raise Unreadable(f"field {name} of {self.kind} is no list of numbers") from None

    def inner(self) -> "list[Node]":
        """The nodes right below this one."""
        return [node for value in self.fields.values() for node in _nodes_in(value)]

    def walk(self) -> "list[Node]":
        """This node and all below it."""
        found = [self]
        for node in found:
            found.extend(node.inner())
        return found


def nodes_of(values: list[Value]) -> list[Node]:
    found = [value for value in values if isinstance(value, Node)]
    if len(found) != len(values):
        raise Unreadable("a list of nodes holds something else")
    return found


def _nodes_in(value: Value) -> list[Node]:
    if isinstance(value, Node):
        return [value]
    return [node for item in value for node in _nodes_in(item)] if isinstance(value, list) else []


@lru_cache(maxsize=500)
def parse(text: str) -> Value:
    """A node, a list, or a token; Unreadable for anything else. Nobody changes what it returns."""
    if "\\\n" in text or text.endswith("\\"):
        # The server breaks long lines, between tokens if it can. In the middle of an escape it would change a meaning.
        raise Unreadable("the printed tree is broken inside a name")
    reader = _Reader(text)
    try:
        value = reader.value()
    except RecursionError:
        raise Unreadable("the tree is nested too deeply") from None
    if reader.peek() is not None:
        raise Unreadable("something follows the tree")
    return value


class _Reader:
    def __init__(self, text: str) -> None:
        self._lexemes = [mark or name for mark, name in _TOKEN.findall(text)]
        self._at = 0

    def peek(self) -> str | None:
        return self._lexemes[self._at] if self._at < len(self._lexemes) else None

    def _take(self) -> str:
        lexeme = self.peek()
        if lexeme is None:
            raise Unreadable("the tree ends too early")
        self._at += 1
        return lexeme

    def value(self) -> Value:
        lexeme = self._take()
        if lexeme == "{":
            return self._node()
        if lexeme == "(":
            return self._list()
        if lexeme in ("}", ")"):
            raise Unreadable(f"{lexeme!r} where a value is expected")
        return None if lexeme == "<>" else lexeme

    def _list(self) -> list[Value]:
        items: list[Value] = []
        while self.peek() != ")":
            items.append(self.value())
        self._take()
        return items

    def _node(self) -> Node:
        kind, fields = self._take(), dict[str, Value]()
        while (lexeme := self._take()) != "}":
            if not lexeme.startswith(":") or lexeme[1:] in fields:
                raise Unreadable(f"{lexeme!r} where a field of {kind} is expected")
            value = self.value()
            if lexeme == ":constvalue" and value is not None:
                value = self._datum()
            fields[lexeme[1:]] = value
        return Node(kind, fields)

    def _datum(self) -> list[Value]:
        """The bytes of a constant behind their number: `[ 20 0 0 0 120 ]`."""
        if self._take() != "[":
            raise Unreadable("a constant without its bytes")
        found: list[Value] = []
        while (lexeme := self._take()) != "]":
            found.append(lexeme)
        return found
