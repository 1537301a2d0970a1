"""Rights of requests to replicas: the table is complete, and the guard goes by it."""

from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from replication.rpc import calls
from replication.rpc.calls import Denied
from replication.rpc.rights import JOINING, REQUEST_RIGHTS, RequestGuard
from tops.model.errors import NotListed, PermissionDenied
from tops.protocol.messages import Principal, Sender
from tops.security import Permissions, Role, Verb
from tops.security.audit import verify

REQUESTS = get_args(calls.AnyRequest)
SENDERS = {
    "reader": Sender("anna", "reader"),
    "writer": Sender("anna", "writer"),
    "admin": Sender("anna", "admin"),
    "replica": Sender("shop/r1", "replica"),
    "other replica": Sender("stock/r1", "replica"),
    "unlisted replica": Sender("shop/r9", "replica"),
    "nobody": Sender("anna", "nobody"),
}
GRANTED = {
    "reader": {Verb.READ},
    "writer": {Verb.READ, Verb.WRITE},
    "admin": {Verb.READ, Verb.WRITE, Verb.OPERATE, Verb.RESPOND},
    "replica": {Verb.READ, Verb.WRITE, Verb.RESPOND},
    "other replica": set(),
    "unlisted replica": {Verb.READ, Verb.WRITE, Verb.RESPOND},
    "nobody": set(),
}
VALUES: dict[Any, Any] = {dict[str, str]: {}, str: "", int: 0, float: 0.0, bytes: b""}


def example(kind: type[calls.ReplicaRequest[Any]], tx: str = "anna.1.1") -> Any:
    """A request of that kind; of the required fields only a transaction's id matters here."""
    required = [field for field in msgspec.structs.fields(kind) if field.required]
    return kind(**{field.name: tx if field.name == "tx" else VALUES.get(field.type, ()) for field in required})


@pytest.fixture
def guard(tmp_path: Path) -> RequestGuard:
    members = frozenset({"shop/r1", "shop/r2"})
    return RequestGuard("test", "shop", Permissions(), tmp_path / "replica" / "audit.log", members)


def test_every_request_has_an_entry_and_no_entry_is_left_over() -> None:
    assert set(REQUEST_RIGHTS) == set(REQUESTS)


def test_a_request_without_an_entry_is_rejected_also_for_administrators(guard: RequestGuard) -> None:
    class Unlisted(calls.ReplicaRequest[Any], frozen=True):
        """A request that somebody forgot to list."""

    with pytest.raises(PermissionDenied, match="no right is defined"):
        guard.check(SENDERS["admin"], Unlisted())  # type: ignore[arg-type]


@pytest.mark.parametrize("who", SENDERS)
@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
def test_what_a_role_may_request(guard: RequestGuard, kind: type[calls.ReplicaRequest[Any]], who: str) -> None:
    sender = SENDERS[who]
    request = example(kind, f"{sender.identity}.1.1")

    if who == "unlisted replica" and kind not in JOINING:
        with pytest.raises(PermissionDenied):
            guard.check(sender, request)
    elif REQUEST_RIGHTS[kind] in GRANTED[who]:
        guard.check(sender, request)
    else:
        with pytest.raises(PermissionDenied) as denied:
            guard.check(sender, request)
        assert denied.value.verb == REQUEST_RIGHTS[kind].value


@pytest.mark.parametrize("kind", [calls.Write, calls.Execute, calls.Read])
def test_a_replica_outside_the_list_is_no_client_by_itself_nor_through_a_service(
    guard: RequestGuard, tmp_path: Path, kind: type[calls.ReplicaRequest[Any]]
) -> None:
    service = Sender("web", "service", "1", on_behalf_of=Principal("shop/r9", "replica"))
    for sender in (SENDERS["unlisted replica"], service):
        with pytest.raises(NotListed, match="shop/r9 is not in the list of replicas of 'shop'") as denied:
            guard.check(sender, example(kind, f"{sender.node}.1.1"))
        assert Denied.because(denied.value).code == "not-listed"
        assert isinstance(Denied.because(denied.value).error(), NotListed)

    guard.members |= {"shop/r9"}
    guard.check(SENDERS["unlisted replica"], example(kind, "shop/r9.1.1"))
    assert '"who":"shop/r9"' in (tmp_path / "replica" / "audit.log").read_text()


def test_a_write_under_the_id_of_another_clients_transaction_is_rejected(guard: RequestGuard) -> None:
    stolen = example(calls.Write, "berta:0a.77.0000000002@r1")

    with pytest.raises(PermissionDenied, match="operate"):
        guard.check(SENDERS["writer"], stolen)
    guard.check(Sender("berta", "writer", "0b"), stolen)  # another process of the same application may ask about it
    guard.check(SENDERS["admin"], stolen)


def test_a_service_needs_the_right_and_so_does_the_identity_that_it_acts_for(guard: RequestGuard) -> None:
    def web(role: str) -> Sender:
        return Sender("web", "service", "1", on_behalf_of=Principal("anna", role))

    own, anothers = example(calls.Write, "web:1.1.1"), example(calls.Write, "web:2.1.1")
    guard.check(web("writer"), own)
    with pytest.raises(PermissionDenied, match=r"site anna \(reader\) may not write"):
        guard.check(web("reader"), own)
    with pytest.raises(PermissionDenied, match=r"site anna \(writer\) may not operate"):
        guard.check(web("writer"), anothers)  # another session of the service may act for somebody else
    with pytest.raises(PermissionDenied, match=r"site web \(service\) may not operate"):
        guard.check(web("admin"), calls.Pause())


def test_roles_of_the_cluster_count(tmp_path: Path) -> None:
    roles = [Role.parse("shopkeeper", ["read rs.shop.**", "operate rs.shop.**"])]
    keeper = Sender("anna", "shopkeeper")

    RequestGuard("test", "shop", Permissions(roles), tmp_path / "audit.log", frozenset()).check(keeper, calls.Pause())
    with pytest.raises(PermissionDenied):
        RequestGuard("test", "stock", Permissions(roles), tmp_path / "audit.log", frozenset()).check(
            keeper, calls.Pause()
        )


def test_a_broker_sends_no_requests(guard: RequestGuard) -> None:
    with pytest.raises(PermissionDenied):
        guard.check(Sender("b1", "broker"), calls.Describe())


def test_rejections_are_counted_and_audited_a_few_per_minute(guard: RequestGuard, tmp_path: Path) -> None:
    service = Sender("web", "reader", on_behalf_of=Principal("mallory", "reader"))
    for _ in range(100):
        with pytest.raises(PermissionDenied):
            guard.check(service, calls.Pause())
    guard.close()

    assert guard.rejected == {"operate": 100}
    path = tmp_path / "replica" / "audit.log"
    assert 30 <= verify(path).records < 40
    assert '"who":"mallory","act":"Pause rs.shop"' in path.read_text()


def test_a_file_that_cannot_be_written_keeps_nobody_from_rejecting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    guard = RequestGuard("test", "shop", Permissions(), tmp_path / "file" / "audit.log", frozenset())

    with pytest.raises(PermissionDenied):
        guard.check(SENDERS["writer"], calls.Pause())


def test_the_documentation_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    rows = "".join(f"| `{kind.__name__}` | {verb.value} |\n" for kind, verb in REQUEST_RIGHTS.items())

    assert f"| request | right |\n|---|---|\n{rows}\n" in page, "write the rows anew:\n" + rows
