"""Settings for the tests of the benchmarks."""

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def _quick_collection():
    """Exclude objects made by the imports, which cost every count a third of a second."""
    gc.freeze()  # and not unfrozen: every Trainer of later tests would search all objects
