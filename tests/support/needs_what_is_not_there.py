"""A command whose own import fails."""

import no_such_module  # type: ignore[import-not-found]  # noqa: F401
