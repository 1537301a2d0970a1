import io
import logging
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tops.security import RedactingFilter, install_redaction, redact, redaction, register_secret
from tops.security.redaction import HIDDEN

CANARY = "c4n4ry-5ecret"
GIVEN_AWAY = [
    f"postgresql://app:{CANARY}@db:5432/shop",
    f"connecting to postgresql://app:{CANARY}@db/shop?sslmode=require now",
    f"postgresql://app:{CANARY}@p@ss/w@db/shop",
    f"postgresql://:{CANARY}@db/shop",
    f"dsn='postgres://a:{CANARY}@h1,postgres://b:{CANARY}@h2'",
    f"https://user:{CANARY}@example.org/path",
    f"host=db user=app password={CANARY} dbname=shop",
    f"host=db password = '{CANARY} with spaces' dbname=shop",
    f'{{"password": "{CANARY} \\" quoted", "user": "app"}}',
    f"{{'api_key': '{CANARY}'}}",
    f"PGPASSWORD={CANARY} psql",
    f"--token={CANARY}",
    f"Config(name='x', secret='{CANARY}')",
    f"client_secret: {CANARY}",
    f"Authorization: Bearer {CANARY}",
    f"authorization=Basic {CANARY}==",
    f"sent Bearer {CANARY} to it",
    f"-----BEGIN PRIVATE KEY-----\n{CANARY}\n-----END PRIVATE KEY-----\n",
    f"-----BEGIN EC PRIVATE KEY-----\\n{CANARY}\\n-----END EC PRIVATE KEY-----",
    f"-----BEGIN ENCRYPTED PRIVATE KEY-----\n{CANARY} cut off here",
    f"PASSWORD: {CANARY}",
    f"passphrase={CANARY}",
    f"?access_token={CANARY}&x=1",
]
HARMLESS = [
    "transaction b1.3.77 committed in 4 ms",
    "GET http://127.0.0.1:7420/v1/topology",
    "ws://127.0.0.1:7420 at 12:30",
    "mail to someone@example.org: done",
    "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
    "token bucket is empty",
]


@pytest.fixture(autouse=True, scope="module")
def nothing_registered() -> Iterator[None]:
    """What other tests of the process have registered is not looked for here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redaction, "_registered", set())
        yield


@pytest.mark.parametrize("text", GIVEN_AWAY)
def test_a_secret_is_hidden(text: str) -> None:
    found = redact(text)

    assert CANARY not in found
    assert HIDDEN in found


@pytest.mark.parametrize("text", HARMLESS)
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert redact(text) == text


def test_what_is_around_a_secret_can_still_be_read() -> None:
    assert redact(f"no route to postgresql://app:{CANARY}@db/shop, retrying") == (
        f"no route to postgresql://app:{HIDDEN}@db/shop, retrying"
    )


def test_a_registered_secret_is_hidden_as_it_is_and_as_a_url_spells_it() -> None:
    secret = "w0rd/with @chars"
    register_secret(secret)

    found = redact(f"a {secret} b {quote(secret, safe='')} c")

    assert found == f"a {HIDDEN} b {HIDDEN} c"


@pytest.mark.parametrize("text", GIVEN_AWAY)
def test_a_registered_word_that_names_secrets_does_not_bring_one_to_light(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redaction, "_registered", {"secret", "password", "token"})

    assert CANARY not in redact(text)
    assert redact("it is secret") == f"it is {HIDDEN}"


@given(st.text(max_size=300), st.sampled_from(GIVEN_AWAY))
def test_text_around_it_does_not_bring_a_secret_back(before: str, text: str) -> None:
    assert CANARY not in redact(f"{before} {text}")


@pytest.mark.parametrize(
    "part",
    ["a://:", "password=", 'password="', "token='\\", "-----BEGIN PRIVATE KEY-----", "bearer ", "secret: ", "://@"],
)
@pytest.mark.timeout(60)  # quadratic work would take hours
def test_a_hostile_megabyte_is_redacted_in_linear_time(part: str) -> None:
    redact(part * (1_000_000 // len(part)))


@pytest.fixture
def log() -> tuple[logging.Logger, io.StringIO]:
    logger, stream = logging.Logger("tops.test"), io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(message)s %(dsn)s", defaults={"dsn": ""}))
    logger.addHandler(handler)
    install_redaction(logger)
    return logger, stream


def test_message_arguments_extras_and_tracebacks_are_redacted(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = log
    dsn = f"postgresql://app:{CANARY}@db/shop"

    logger.warning("connecting to %s", dsn)
    logger.warning(dsn)
    logger.warning("config %r", {"password": CANARY})
    logger.warning("extra", extra={"dsn": dsn})
    try:
        raise OSError(f"can't reach {dsn}")
    except OSError:
        logger.exception("failed", stack_info=True)
    logger.warning("%d items", f"password={CANARY}")

    text = stream.getvalue()
    assert CANARY not in text
    assert text.count(HIDDEN) >= 5
    assert "OSError" in text


class ErrorsAnew(logging.Formatter):
    """Formats errors by itself, as writers of JSON logs do."""

    def format(self, record: logging.LogRecord) -> str:
        return self.formatException(record.exc_info) if record.exc_info else f"{record.msg} {record.exc_text}"


def test_a_formatter_that_formats_errors_anew_finds_only_the_redacted_text(
    log: tuple[logging.Logger, io.StringIO],
) -> None:
    logger, stream = log
    logger.handlers[0].setFormatter(ErrorsAnew())

    try:
        raise OSError(f"password={CANARY}")
    except OSError:
        logger.exception("failed")

    assert CANARY not in stream.getvalue()
    assert HIDDEN in stream.getvalue()


def test_source_lines_in_a_stack_are_redacted(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = log

    logger.warning("here", stack_info=True)  # password=c4n4ry-5ecret

    assert "stack_info=True" in stream.getvalue()
    assert CANARY not in stream.getvalue()


def test_an_extra_whose_name_says_secret_is_hidden_whatever_it_holds() -> None:
    record = logging.makeLogRecord({"msg": "x", "auth_token": CANARY})

    RedactingFilter().filter(record)

    assert CANARY not in str(record.__dict__)


def test_installing_twice_adds_one_filter(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, _ = log

    install_redaction(logger)

    assert len(logger.handlers[0].filters) == 1
