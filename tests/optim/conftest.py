"""Optax's rules multiply floats by integer counts, so all of these tests promote as most users have it."""

import pytest


@pytest.fixture(autouse=True)
def _promoting(standard_promotion):
    pass
