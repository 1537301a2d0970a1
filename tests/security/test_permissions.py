"""Verb × form of name × role, generated: the expected answer comes from a second, slower reading of the rules."""

import itertools
import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tops.model.errors import ConfigError, PermissionDenied
from tops.security import DEFAULT_ROLES, EVERYTHING, Identity, Kind, Pattern, Permissions, Role, Rule, Verb
from tops.security.patterns import _segment_matches
from tops.security.permissions import DECISIONS_MAX, require_broker

RIGHTS = {
    "admin": {verb.value for verb in Verb} - {"represent"},
    "participant": {"subscribe", "read", "advertise", "publish", "begin", "write", "follow", "participate"},
    "writer": {"subscribe", "read", "advertise", "publish", "begin", "write", "follow"},
    "reader": {"subscribe", "read"},
    "service": {"subscribe", "begin", "read", "write", "represent"},
    "replica": set[str](),  # has rights on the types of its own set only, see below
    "broker": {verb.value for verb in Verb} - {"operate", "administer", "represent"},
    "unheard-of": set[str](),
}
NAMES = ["orders", "shop.orders", "shop.orders.eu", "Orders", "a b", "shop..orders", ".", "ä.ö", "x" * 255]
NOT_NAMES = ["", "*", "orders*", "shop.*", "shop.**", "a\x00b", "a\nb", "a\u200bb", "x" * 256, "\ud800"]


def someone(role: str, name: str = "someone") -> Identity:
    kind = {"broker": Kind.BROKER, "replica": Kind.REPLICA}.get(role, Kind.SITE)
    return Identity("shop", kind, f"stock/{name}" if kind is Kind.REPLICA else name, role)


@pytest.mark.parametrize(("verb", "role", "name"), [*itertools.product(Verb, RIGHTS, [*NAMES, EVERYTHING])])
def test_a_default_role_has_its_verbs_on_every_name_and_no_other(verb: Verb, role: str, name: str) -> None:
    permissions = Permissions()

    if verb.value in RIGHTS[role]:
        permissions.check(someone(role), verb, name)
    else:
        with pytest.raises(PermissionDenied, match=f"may not {verb.value}") as rejected:
            permissions.check(someone(role), verb, name)
        assert (rejected.value.verb, rejected.value.event_type) == (verb.value, name)


OF_A_REPLICA = {"subscribe", "read", "advertise", "publish", "begin", "write", "follow", "participate", "respond",
                "originate", "resolve"}  # fmt: skip


@pytest.mark.parametrize("verb", Verb)
def test_a_replica_has_its_verbs_on_the_types_of_its_own_set_and_on_no_other(verb: Verb) -> None:
    permissions, replica = Permissions(), someone("replica")

    for name in ("rs.stock", "rs.stock.request0", "rs.stock.response1"):
        assert permissions.allowed(replica, verb, name) is (verb.value in OF_A_REPLICA)
    for name in ("rs", "rs.stocks", "rs.shop", "rs.shop.request0", "stock", "xrs.stock", EVERYTHING):
        assert not permissions.allowed(replica, verb, name)


@pytest.mark.parametrize(("verb", "role", "name"), [*itertools.product(Verb, RIGHTS, NOT_NAMES)])
def test_nobody_has_a_right_to_what_is_no_name(verb: Verb, role: str, name: str) -> None:
    with pytest.raises(PermissionDenied):
        Permissions().check(someone(role), verb, name)


PATTERNS = ["**", "shop.**", "shop.*", "shop.orders", "*.orders", "*ord*", "shop.o*s", "shop.*.eu", "**"]
ROLES = [
    Role.parse("custom", [f"{verb.value} {allow}"], [f"{denied.value} {deny}"])
    for verb, denied in [(Verb.PUBLISH, Verb.PUBLISH), (Verb.SUBSCRIBE, Verb.PUBLISH), (Verb.BEGIN, Verb.BEGIN)]
    for allow, deny in itertools.permutations(PATTERNS, 2)
]


def slow_match(pattern: str, name: str) -> bool:
    """The grammar again, as a regular expression; fit for short patterns of our own only."""
    if pattern == "**":
        return True
    if pattern.endswith(".**"):
        head = pattern.removesuffix(".**")
        return any(slow_match(head, ".".join(name.split(".")[:n])) for n in range(1, len(name.split(".")) + 1))
    return re.fullmatch(re.escape(pattern).replace(r"\*", "[^.]*"), name) is not None


@pytest.mark.parametrize("role", ROLES, ids=lambda role: f"{role.allow[0].pattern.text}-{role.deny[0].pattern.text}")
def test_a_rule_allows_what_it_matches_and_a_denial_wins(role: Role) -> None:
    permissions = Permissions([role])

    for verb, name in itertools.product(Verb, NAMES):
        allowed = any(r.verb is verb and slow_match(r.pattern.text, name) for r in role.allow)
        denied = any(r.verb is verb and slow_match(r.pattern.text, name) for r in role.deny)
        assert permissions.allowed(someone("custom"), verb, name) is (allowed and not denied), (verb, name)


segment = st.text("ab*", min_size=1, max_size=6).filter(lambda text: "**" not in text)
tails = st.sampled_from([[], ["**"]])
pattern_text = st.tuples(st.lists(segment, min_size=1, max_size=3), tails).map(
    lambda parts: ".".join(parts[0] + parts[1])
)
type_name = st.text("ab.", min_size=1, max_size=12)


@settings(max_examples=1000)
@given(pattern_text, type_name)
@example("a*a", "a")
@example("a*b*a", "aba")
@example("a*ab*a", "aba")
def test_matching_agrees_with_the_grammar(pattern: str, name: str) -> None:
    assert Pattern(pattern).matches(name) is slow_match(pattern, name)


@given(type_name)
def test_a_name_matches_itself_as_a_pattern(name: str) -> None:
    assert Pattern(name).matches(name)


def test_an_open_end_includes_the_name_itself_but_not_one_that_only_begins_like_it() -> None:
    pattern = Pattern("payroll.**")

    assert [pattern.matches(n) for n in ("payroll", "payroll.eu", "payroll.eu.2026", "payrolls", "x.payroll")] == [
        True,
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("text", ["", "***", "a**", "**.a", "a.**.b", "a.**b", "a\n", "x" * 256, "a\u200b"])
def test_a_pattern_outside_the_grammar_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="pattern"):
        Pattern(text)


@pytest.mark.parametrize("text", ["", "publish", "publish ", "mend orders", "PUBLISH orders", "publish  **x"])
def test_a_rule_that_can_not_be_read_is_refused_with_the_name_of_its_role(text: str) -> None:
    with pytest.raises(ConfigError, match="role 'billing'"):
        Role.parse("billing", [text])


class CountingText(str):
    """A segment that counts how often the matcher searches it."""

    searches = 0

    def find(self, *arguments: Any) -> int:
        CountingText.searches += 1
        return super().find(*arguments)


@pytest.mark.parametrize("stars", [1, 10, 60, 126])
@pytest.mark.parametrize("text", ["a" * 254 + "c", "a" * 254 + "b", "ac" * 127 + "b", "ab" * 127 + "c"])
def test_an_adversarial_pattern_searches_at_most_once_per_piece(stars: int, text: str) -> None:
    pattern = Pattern("a*" * stars + "b")
    CountingText.searches = 0

    matched = _segment_matches(pattern._segments[0], CountingText(text))

    assert matched is (text.endswith("b") and text.count("a") >= stars)
    assert CountingText.searches <= stars


def test_an_act_on_the_whole_cluster_needs_everything_without_exception() -> None:
    most = Role.parse("most", ["administer **"], ["administer payroll"])
    some = Role.parse("some", ["administer *", "administer shop.**"])
    permissions = Permissions([most, some])

    assert permissions.allowed(someone("admin"), Verb.ADMINISTER, EVERYTHING)
    assert not permissions.allowed(someone("most"), Verb.ADMINISTER, EVERYTHING)
    assert not permissions.allowed(someone("some"), Verb.ADMINISTER, EVERYTHING)
    assert permissions.allowed(someone("most"), Verb.ADMINISTER, "orders")


def test_a_configured_role_replaces_the_default_of_its_name() -> None:
    permissions = Permissions([Role.parse("writer", ["publish orders"])])

    assert permissions.allowed(someone("writer"), Verb.PUBLISH, "orders")
    assert not permissions.allowed(someone("writer"), Verb.PUBLISH, "payroll")
    assert DEFAULT_ROLES["writer"].allows(Verb.PUBLISH, "payroll")


def test_the_brokers_role_can_not_be_replaced() -> None:
    with pytest.raises(ConfigError, match="fixed"):
        Permissions([Role("broker")])


def test_the_cached_decision_is_the_first_one_and_belongs_to_one_identity() -> None:
    permissions = Permissions([Role("custom", (Rule(Verb.PUBLISH, Pattern("orders")),))])

    for _ in range(2):
        assert permissions.allowed(someone("custom", "a"), Verb.PUBLISH, "orders")
        assert not permissions.allowed(someone("custom", "a"), Verb.SUBSCRIBE, "orders")
        assert not permissions.allowed(someone("reader", "a"), Verb.PUBLISH, "orders")


def test_a_flood_of_names_keeps_the_cache_bounded_and_leaves_other_identities_theirs() -> None:
    permissions, quiet, loud = Permissions(), someone("reader", "quiet"), someone("reader", "loud")
    permissions.allowed(quiet, Verb.SUBSCRIBE, "orders")

    for n in range(3 * DECISIONS_MAX):
        permissions.allowed(loud, Verb.SUBSCRIBE, f"orders{n}")

    assert len(permissions._decisions[loud]) <= DECISIONS_MAX
    assert permissions._decisions[quiet] == {(Verb.SUBSCRIBE, "orders"): True}


def test_a_message_between_brokers_is_refused_from_a_site_whatever_its_role() -> None:
    require_broker(someone("broker"), "a decision")

    for role in ("admin", "replica"):
        with pytest.raises(PermissionDenied, match="only brokers"):
            require_broker(someone(role), "a decision")
