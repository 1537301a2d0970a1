"""Settings of the tests of single machines."""

from hypothesis import settings

# How long an example takes says more about the machine that it runs on than about the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
