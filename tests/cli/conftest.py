from pathlib import Path

import pytest


@pytest.fixture
def repository() -> Path:
    return Path(__file__).parents[2]
