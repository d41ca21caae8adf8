"""Wild options, files and environments: see tests/fuzz.py."""

import random

import pytest

from tests import fuzz


@pytest.mark.long
def test_a_thousand_cases_end_in_a_line(capsys):
    seed = random.SystemRandom().randrange(10**6)
    with capsys.disabled():
        print(f"tests/fuzz.py --seed {seed}")
    assert fuzz.fuzz(seed, list(range(1000)), jobs=2) == 0
