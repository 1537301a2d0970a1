"""The table of rights of link messages is complete, and the documentation shows it as it is."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from tops.model.errors import ProtocolError
from tops.model.ids import NodeId
from tops.protocol.messages import Address, AddressedMessage, Dissemination, Envelope, LinkMessage, Publication
from tops.runtime.edge.guard import Guard
from tops.runtime.edge.rights import LINK_RIGHTS, links_table, roles_table
from tops.security import Identity, Kind, Permissions

DOCS = Path(__file__).parent.parent.parent / "docs" / "security.md"
SENDABLE = (*get_args(AddressedMessage), *get_args(Publication), *get_args(LinkMessage))


@pytest.mark.parametrize("kind", SENDABLE, ids=lambda kind: kind.__name__)
def test_every_message_has_an_entry(kind: type) -> None:
    assert kind in LINK_RIGHTS


def test_no_entry_is_about_something_that_is_no_message() -> None:
    assert set(LINK_RIGHTS) == set(SENDABLE)


@pytest.mark.parametrize("kind", [k for k in SENDABLE if LINK_RIGHTS[k] is None], ids=lambda kind: kind.__name__)
def test_what_only_brokers_send_passes_from_no_site_whatever_its_role(kind: Any) -> None:
    guard = Guard(Identity("shop", Kind.SITE, "root", "admin"), Permissions(), ["b1"])
    blank = kind(**dict.fromkeys(kind.__struct_fields__))  # its kind alone is rejected
    message: LinkMessage = blank
    if kind in get_args(AddressedMessage):
        message = Envelope(to=Address(NodeId("b1")), body=blank)
    elif kind in get_args(Publication):
        message = Dissemination(rendezvous=NodeId("b1"), upward=True, early=False, publication=blank)

    with pytest.raises(ProtocolError, match="only brokers send"):
        guard.rejection(message)


def test_a_message_without_an_entry_can_not_be_sent() -> None:
    class Unknown:
        pass

    guard = Guard(Identity("shop", Kind.SITE, "root", "admin"), Permissions(), ["b1"])

    with pytest.raises(ProtocolError, match="only brokers send"):
        guard.rejection(Unknown())  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "table"), [("roles", roles_table), ("links", links_table)])
def test_the_documentation_shows_the_tables_as_they_are(name: str, table: object) -> None:
    shown = re.search(rf"<!-- table: {name} -->\n(.*?)<!-- end -->", DOCS.read_text(), re.DOTALL)

    assert shown is not None
    assert shown[1].strip() == table().strip(), f"put the output of tops.runtime.edge.rights.{name}_table() there"  # type: ignore[operator]
