"""How often the interpreter searches for reference cycles, in processes that only carry messages."""

import gc

YOUNG, MIDDLE, OLD = 50_000, 50, 1000


def collect_rarely() -> None:
    """Search for reference cycles after many allocations instead of a few hundred.

    Messages, effects and records hold no cycles and are freed by counting; a process that makes hundreds of them per
    transaction otherwise looks again and again at those that are still under way."""
    gc.set_threshold(YOUNG, MIDDLE, OLD)
