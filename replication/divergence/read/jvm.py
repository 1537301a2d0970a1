"""Java for Spark: is there one, and how does it start quickly.

Half of what a short Spark job costs is loading classes. The first run leaves an archive of them (class data sharing) in
the user's cache; later runs map it into memory and start in about half the time. An archive that does not fit the Java
or the Spark at hand is ignored by the JVM, and one that was cut short has no header and is ignored too.
"""

import os
import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pyspark

from replication.tables.errors import JavaMissing

JAVA_MIN = 17
# A check is short: compiling little and collecting simply starts sooner than it loses later.
SHORT_LIVED = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xshare:auto -Xlog:disable"


def require_java() -> str:
    """The version of the Java that Spark will find, or one clear line, before Spark says it in forty."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=str(Path(home) / "bin")) if home else shutil.which("java")
    if java is None:
        raise JavaMissing(f"JAVA_HOME ({home}) has no bin/java" if home else "there is no java on the PATH")
    response = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr  # noqa: S603
    version = re.search(r'version "((\d+)[^"]*)"', response)
    if version is None or int(version[2]) < JAVA_MIN:
        raise JavaMissing(f"{java} says {response.strip().splitlines()[0] if response.strip() else 'nothing'}")
    return version[1]


def options(java_version: str) -> str:
    """What the driver's JVM is started with."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "tops"
    archive = cache / f"spark-{pyspark.__version__}-java-{java_version}.jsa"
    if " " in str(archive):  # these options have no quoting
        return SHORT_LIVED
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _adopt(archive)
    except OSError:
        return SHORT_LIVED
    if archive.exists():
        return f"{SHORT_LIVED} -XX:SharedArchiveFile={archive}"
    if _in_use_by_java(f"{archive.parent / archive.stem}."):
        return SHORT_LIVED  # writing an archive takes many seconds of processor time: one is enough
    return f"{SHORT_LIVED} -XX:ArchiveClassesAtExit={archive.with_suffix(f'.{os.getpid()}')}"


def _adopt(archive: Path) -> None:
    """Take what an earlier run left; a JVM writes its archive after the program that started it has ended."""
    for left in sorted(archive.parent.glob(f"{archive.stem}.*[0-9]")):
        writer = int(left.suffix[1:])
        if not psutil.pid_exists(writer) and not _in_use_by_java(str(left)):
            with suppress(OSError):
                left.unlink() if archive.exists() else left.replace(archive)


def _in_use_by_java(file: str) -> bool:
    for process in psutil.process_iter(["name"]):
        with suppress(psutil.Error):
            if process.info["name"] == "java" and any(file in argument for argument in process.cmdline()):
                return True
    return False
