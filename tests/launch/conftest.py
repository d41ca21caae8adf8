"""Provides a fixture that several tests of this folder use."""

import pytest

from tests.support.launched import Runs


@pytest.fixture
def runs(tmp_path):
    """Starts launchers of small modules; none of their processes may be left behind."""
    made = Runs(tmp_path)
    yield made
    left = made.alive()
    made.close()
    assert not left, "processes were left behind"
