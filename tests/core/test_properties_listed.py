"""The list of properties names tests that exist."""

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_test_that_the_list_of_properties_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (HERE / "README.md").read_text()))
    sources = [
        path.read_text() for folder in ("core", "scenarios", "sim") for path in (HERE.parent / folder).glob("*.py")
    ]
    defined = set(re.findall(r"^def (test_\w+)", "\n".join(sources), re.MULTILINE))

    assert len(named) > 50
    assert named - defined == set()
