import pytest

import minamp


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts from the same generator state, in whatever order tests run."""
    minamp.manual_seed(0)
