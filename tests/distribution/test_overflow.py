"""Half precision: an overflow on one replica makes all of them skip the step."""

import json

import numpy as np
import pytest

from tests.support import processes


@pytest.mark.parametrize("workers", [1, 2], ids=["mirrored x 2", "2 workers"])
def test_an_overflow_on_the_last_replica_only(workers, tmp_path):
    output = tmp_path / "seen"
    if workers == 1:
        chosen = json.dumps({"strategy": "mirrored", "replicas": 2})
        processes.run_script("tests/support/overflow_run.py", chosen, str(output))
    else:
        chosen = json.dumps({"strategy": "multi_worker"})
        processes.launch(2, "overflow_run", chosen, str(output), logs=tmp_path / "logs")
    seen = [json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in range(workers)]
    for worker in seen:
        scales = [step["scale"] for step in worker]
        assert scales == [2.0**15] * 2 + [2.0**14] * 4
        assert [step["iterations"] for step in worker] == [1, 2, 2, 3, 4, 5]
        assert worker[1]["weights"] == worker[2]["weights"], "the step was not skipped"
        assert worker[2]["weights"] != worker[3]["weights"], "training did not go on"
        for step in worker:
            assert all(np.isfinite(np.array(value)).all() for value in step["weights"])
            assert np.isfinite(step["loss"])
    if workers == 1:  # the two replicas' copies stand beside each other
        for step in seen[0]:
            assert step["weights"][0::2] == step["weights"][1::2]
    else:
        assert [s["weights"] for s in seen[0]] == [s["weights"] for s in seen[1]]
