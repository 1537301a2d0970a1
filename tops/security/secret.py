"""The shared secret of nodes without keys: its file, its creation, and how a node proves that it knows it.

Each broker without keys has one, in a file that only its user can read; every process that can read the file may
connect. The secret itself is never sent: a client would give it to any program that has bound the port first. Both
sides send an HMAC over what is unique to the connection (`tops.security.handshake`) or to the request
(`tops.security.tokens`).

    $XDG_STATE_HOME/tops/HOST_PORT.token, or ~/.local/state/tops/HOST_PORT.token    one per address of a broker
    $TOPS_TOKEN_FILE                                                                if set: one file for all
"""

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tops.model.errors import ConfigError, NotAuthenticated
from tops.security.files import PRIVATE, check_private_folder, create_whole, write_whole
from tops.security.listen import split_address
from tops.security.redaction import register_secret

VARIABLE = "TOPS_TOKEN_FILE"
PROOF_BYTES = 32
SECRET_BYTES = 32
LENGTH_MIN = 32  # characters: a short secret could be found by guessing, from an HMAC that was seen

HTTP_PORT = 80  # of an address without one
_EVERY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104 - names of an address, nothing is bound
_BY_HAND = (
    f"run as the user who runs the broker, or set {VARIABLE} to a copy of the broker's file; "
    "on another machine the operator has to place that copy"
)


@dataclass(frozen=True, slots=True)
class Secret:
    """A secret that was read from its file; neither printing nor logging shows it."""

    path: Path
    _key: bytes = field(repr=False)

    def proof(self, transcript: bytes) -> bytes:
        return hmac.digest(self._key, transcript, hashlib.sha256)

    def proves(self, proof: bytes, transcript: bytes) -> bool:
        """Whether `proof` was made with knowledge of the secret."""
        return hmac.compare_digest(proof, self.proof(transcript))


def secret_path(address: str) -> Path:
    """The file with the secret of the broker at this `host:port`."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen)
    host, port = split_address(address)
    if host == "localhost" or host in _EVERY_ADDRESS:
        host = "127.0.0.1"
    return _state_folder() / f"{host}_{port or HTTP_PORT}.token"


def find_secret(address: str) -> Secret:
    """For a client: the secret of the broker at this `host:port`; NotAuthenticated names the expected file."""
    path = secret_path(address)
    try:
        return _read(path)
    except FileNotFoundError:
        raise NotAuthenticated(f"{address} has no keys, and its secret {path} does not exist: {_BY_HAND}") from None
    except OSError as error:
        raise NotAuthenticated(
            f"{address} has no keys, and its secret {path} can't be read: {error.strerror}; {_BY_HAND}"
        ) from None
    except ConfigError as error:
        raise NotAuthenticated(str(error)) from None


def make_secret(addresses: Sequence[str]) -> Secret:
    """For a broker: its secret, created unless it exists, in the files that clients of all its addresses read."""
    first, *others = dict.fromkeys(secret_path(address) for address in addresses)
    try:
        _make_folder(first.parent)
        create_whole(first, f"{secrets.token_hex(SECRET_BYTES)}\n".encode(), PRIVATE)
        made = _read(first)
        for other in others:
            write_whole(other, first.read_bytes(), PRIVATE)
    except OSError as error:
        raise ConfigError(
            f"{first}: the secret of this broker can't be stored there: {error.strerror}; "
            f"make the folder writable for its user, or set {VARIABLE} or XDG_STATE_HOME"
        ) from None
    return made


def _state_folder() -> Path:
    try:
        base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    except RuntimeError:
        raise ConfigError(f"this user has no home folder for secrets: set {VARIABLE} or XDG_STATE_HOME") from None
    return base / "tops"


def _make_folder(folder: Path) -> None:
    if os.environ.get(VARIABLE):
        return  # the operator's folder: only the mode of the file is checked
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private_folder(folder)


def _read(path: Path) -> Secret:
    # A file that the operator names may be readable for a group; other files never.
    forbidden = 0o007 if os.environ.get(VARIABLE) else 0o077
    with open(path, "rb", opener=_without_waiting) as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{path}: a secret must be in a regular file, and this is not one: name another path")
        key = file.read(4096).strip()
    if mode & forbidden:
        raise ConfigError(
            f"{path}: mode {stat.S_IMODE(mode):04o} lets other users read this secret: run chmod 600 {path}"
        )
    if len(key) < LENGTH_MIN:
        raise ConfigError(
            f"{path}: a secret has at least {LENGTH_MIN} characters, this one {len(key)}: "
            "remove the file and start the broker again, or write a longer one"
        )
    register_secret(key.decode(errors="replace"))
    return Secret(path, key)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # to open a pipe takes as long as nothing writes to it
