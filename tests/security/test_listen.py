from collections.abc import Callable

import pytest

from tops.model.errors import ConfigError
from tops.security import PLAIN_WORDS, check_connect, check_listen, is_loopback

LOOPBACK = ["127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost", "::ffff:127.0.0.1"]
OPEN = [
    "",
    "0.0.0.0",
    "::",
    "192.168.1.5",
    "2001:db8::1",
    "example.org",
    "localhost.example.org",
    "127.0.0.1.nip.io",
    "*",
]


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback_may_do_without_tls(host: str) -> None:
    assert is_loopback(host)
    check_listen(host, tls=False)
    check_connect(host, tls=False)


@pytest.mark.parametrize("host", OPEN)
@pytest.mark.parametrize("check", [check_listen, check_connect])
def test_another_address_without_tls_is_refused_with_three_remedies(host: str, check: Callable[..., None]) -> None:
    with pytest.raises(ConfigError) as rejected:
        check(host, tls=False)

    assert all(word in str(rejected.value) for word in ("tops keys", "loopback", PLAIN_WORDS))


@pytest.mark.parametrize("host", OPEN)
def test_tls_or_the_plain_words_open_any_address(host: str) -> None:
    check_listen(host, tls=True)
    check_listen(host, tls=False, plain_words=PLAIN_WORDS)


@pytest.mark.parametrize("words", ["", "yes", "true", PLAIN_WORDS.upper(), PLAIN_WORDS + ".", "ja, ich weiß"])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("tls", [True, False])
def test_other_words_are_a_mistake_wherever_they_stand(words: str, host: str, tls: bool) -> None:
    with pytest.raises(ConfigError, match="is not valid"):
        check_listen(host, tls, words)
