"""Documents name files that exist."""

import re
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
