"""Documents name files that exist, pictures are current, and the site builds."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").rglob("*.md")])
MENTIONED = re.compile(
    r"`((?:tops|replication|adapters|bench|compose|tests|examples)/[\w/.-]+\.(?:py|md|txt|toml|json|yml|yaml))[`:]"
)
GENERATED = ("bench/results/",)


def missing_files(text: str) -> list[str]:
    """The files that a document mentions and the project does not have."""
    mentioned = [path for path in MENTIONED.findall(text) if not path.startswith(GENERATED)]
    return [path for path in mentioned if not (ROOT / path).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_document_mentions_only_files_that_exist(document: Path) -> None:
    assert missing_files(document.read_text()) == []


def test_a_file_that_was_moved_is_found() -> None:
    assert missing_files("see `tops/core/nowhere.py` and `tops/py.typed`") == ["tops/core/nowhere.py"]


def test_the_picture_of_the_packages_is_the_one_of_the_code() -> None:
    drawn = subprocess.run(
        [sys.executable, "-c", "import package_graph; print(package_graph.picture(), end='')"],
        cwd=ROOT / "docs",
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert (ROOT / "docs" / "pictures" / "packages.svg").read_text() == drawn, "draw it again with `make docs`"


def test_every_decision_is_listed_and_has_its_three_parts() -> None:
    folder = ROOT / "docs" / "decisions"
    pages = sorted(page for page in folder.glob("*.md") if page.name != "README.md")
    listed = (folder / "README.md").read_text() + (ROOT / "mkdocs.yml").read_text()

    assert [page.name for page in pages if listed.count(page.name) != 2] == []
    for page in pages:
        headings = [line for line in page.read_text().splitlines() if line.startswith("## ")]
        assert headings == ["## Context", "## Decision", "## Consequences"], page.name


def alarms_raised() -> set[str]:
    """The kinds of the alarms in the code."""
    sources = [path.read_text() for path in (ROOT / "tops").rglob("*.py")]
    return {kind for source in sources for kind in re.findall(r"\b[Aa]larm\(\s*\"([a-z-]+)\"", source)}


def test_every_alarm_is_among_the_runbooks() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()

    assert {"journal-stale", "keys"} <= alarms_raised()
    assert {kind for kind in alarms_raised() if f"`{kind}`" not in text} == set()


def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra 'docs' is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]

    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert built.returncode == 0, built.stdout + built.stderr
    pages = [page.read_text() for page in tmp_path.rglob("*.html")]
    assert [address for page in pages for address in loaded_from_elsewhere(page)] == []


def loaded_from_elsewhere(page: str) -> list[str]:
    """What a page makes a browser load from other servers; links are no loads."""
    return re.findall(r"<(?:script|img|iframe)[^>]*\bsrc=\"?(https?://[^\s\">]+)", page) + re.findall(
        r"<link[^>]*\brel=\"?(?:stylesheet|preconnect|preload)\"?[^>]*\bhref=\"?(https?://[^\s\">]+)", page
    )


def test_a_page_that_loads_a_font_from_elsewhere_is_found() -> None:
    page = '<link rel="stylesheet" href="https://fonts.example.org/css?family=Roboto">'

    assert loaded_from_elsewhere(page) == ["https://fonts.example.org/css?family=Roboto"]
