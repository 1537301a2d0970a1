"""How metrics are named and explained: `tops_<noun>_<unit>`, and a help text that begins with what is measured."""

import re

HELP = re.compile(r"(Number of|Whether|Age of|Duration|Size of|Time at|Last index) ?.*\.")
UNITS = ("_seconds", "_bytes")


def bad_name(name: str, kind: str) -> str:
    """What is wrong with the name of a metric, without `_total`; empty if nothing is."""
    if not re.fullmatch(r"tops_[a-z0-9]+(_[a-z0-9]+)*", name):
        return f"{name} is not tops_<noun>_<unit>"
    if kind == "histogram" and not name.endswith(UNITS):
        return f"{name} is a histogram without a unit"
    return f"{name} abbreviates its unit" if re.search(r"_(s|ms|mb|kb)$", name) else ""


def bad_help(name: str, text: str) -> str:
    """What is wrong with a help text; empty if nothing is."""
    return "" if HELP.fullmatch(text) else f"{name}: {text!r}"
