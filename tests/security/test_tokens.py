"""Tokens for HTTP without keys: good for one purpose, for a while, most of them once."""

from pathlib import Path

import pytest
from aiohttp.test_utils import make_mocked_request

from tops.http.gate import shows
from tops.model.errors import NotAuthenticated
from tops.security import Secret, TokenKind, Tokens, make_token, request_subject

SECRET = Secret(Path("file"), b"a secret of the broker, long enough")
OTHER = Secret(Path("file"), b"a secret of another, long enough too")
START = 1_700_000_000.0
NOW = START + 10


@pytest.fixture
def tokens() -> Tokens:
    return Tokens(SECRET, START)


@pytest.mark.parametrize("kind", TokenKind)
def test_a_token_is_good_for_its_kind_and_subject_only(tokens: Tokens, kind: TokenKind) -> None:
    token = make_token(SECRET, kind, "here", NOW)

    for wrong_kind in set(TokenKind) - {kind}:
        with pytest.raises(NotAuthenticated, match="not made with"):
            tokens.check(token, wrong_kind, "here", NOW)
    with pytest.raises(NotAuthenticated, match="not made with"):
        tokens.check(token, kind, "there", NOW)
    with pytest.raises(NotAuthenticated, match="not made with"):
        tokens.check(make_token(OTHER, kind, "here", NOW), kind, "here", NOW)
    tokens.check(token, kind, "here", NOW)


@pytest.mark.parametrize("kind", [TokenKind.REQUEST, TokenKind.BROWSER])
def test_a_token_for_one_use_is_taken_once_also_over_a_restart(tokens: Tokens, kind: TokenKind) -> None:
    token = make_token(SECRET, kind, "here", NOW)
    tokens.check(token, kind, "here", NOW)

    with pytest.raises(NotAuthenticated, match="used before"):
        tokens.check(token, kind, "here", NOW + 1)
    with pytest.raises(NotAuthenticated, match="used before"):
        Tokens(SECRET, NOW + 2).check(token, kind, "here", NOW + 3)


def test_a_session_is_good_many_times_and_outlives_the_broker(tokens: Tokens) -> None:
    session = make_token(SECRET, TokenKind.SESSION, "here", NOW)

    for later in (0, 1, 3600):
        tokens.check(session, TokenKind.SESSION, "here", NOW + later)
    Tokens(SECRET, NOW + 10).check(session, TokenKind.SESSION, "here", NOW + 20)


@pytest.mark.parametrize("kind", TokenKind)
def test_a_token_that_is_too_old_or_from_the_future_is_rejected(tokens: Tokens, kind: TokenKind) -> None:
    token = make_token(SECRET, kind, "here", NOW)

    for when in (NOW + kind.lifetime_s + 1, NOW - 61):
        with pytest.raises(NotAuthenticated, match="s old"):
            tokens.check(token, kind, "here", when)


@pytest.mark.parametrize("garbage", ["", ".", "..", "a.b.c", "1.2.é", "1" * 5000, "1700000000000..", "-1.x.y"])
def test_garbage_is_rejected(tokens: Tokens, garbage: str) -> None:
    for kind in TokenKind:
        with pytest.raises(NotAuthenticated):
            tokens.check(garbage, kind, "here", NOW)


def test_used_tokens_are_forgotten_when_they_would_be_too_old(tokens: Tokens) -> None:
    for second in range(500):
        now = NOW + second
        tokens.check(make_token(SECRET, TokenKind.REQUEST, "here", now), TokenKind.REQUEST, "here", now)

    assert len(tokens._used) <= TokenKind.REQUEST.lifetime_s + 1


def test_the_subject_of_a_request_tells_method_host_and_path_apart() -> None:
    subjects = {
        request_subject(host, method, path)
        for host in ("a:1", "a:2")
        for method in ("GET", "POST")
        for path in ("/v1/x", "/v1/x?y=1")
    }

    assert len(subjects) == 8
    assert request_subject("LOCALHOST:1", "GET", "/") == request_subject("localhost:1", "GET", "/")


def test_a_token_of_the_brokers_first_millisecond_counts() -> None:
    started = START + 0.0004
    subject = request_subject("127.0.0.1:1", "GET", "/v1/topology")
    token = make_token(SECRET, TokenKind.REQUEST, subject, started + 0.0001)

    Tokens(SECRET, started).check(token, TokenKind.REQUEST, subject, started + 0.0002)


@pytest.mark.parametrize("token", ["", "a-token-of-the-set"])
@pytest.mark.parametrize("headers", [{}, {"Authorization": ""}, {"Authorization": "Bearer "}, {"Authorization": "x"}])
def test_a_request_without_a_bearer_token_shows_none(headers: dict[str, str], token: str) -> None:
    assert not shows(make_mocked_request("POST", "/", headers=headers), token)


def test_a_request_shows_its_bearer_token_and_no_other() -> None:
    request = make_mocked_request("POST", "/", headers={"Authorization": "Bearer a-token-of-the-set"})

    assert shows(request, "a-token-of-the-set")
    assert not shows(request, "another-token-of-the-set")
