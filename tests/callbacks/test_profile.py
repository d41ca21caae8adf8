import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from callbacks.errors import CannotSave
from callbacks.profile import Profile
from tests.support import tiny_recipe
from training.errors import OptionsError


def steps_in(folder):
    """The steps whose traces stand in the only profile of a run's folder."""
    (path,) = folder.glob("plugins/profile/*/*.xplane.pb")
    space = xplane_pb2.XSpace.FromString(path.read_bytes())
    found = set()
    for plane in space.planes:
        names = {number: entry.name for number, entry in plane.stat_metadata.items()}
        events = {number: entry.name for number, entry in plane.event_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                if events[event.metadata_id] == "train":
                    found |= {
                        stat.int64_value or stat.uint64_value
                        for stat in event.stats
                        if names[stat.metadata_id] == "step_num"
                    }
    return found


def run(folder, **options):
    return tiny_recipe.main(tiny_recipe.Options(run_dir=folder, **options))


def test_the_steps_that_were_named_and_no_others(tmp_path):
    """In the second epoch, and numbers and logs are those of a run without it."""
    found = run(tmp_path / "run", profile="11:13")
    assert steps_in(tmp_path / "run") == {11, 12, 13}
    assert "profile of steps 11 to 13 in" in (tmp_path / "run" / "worker-0.log").read_text()
    assert found["weights_sha256"] == run(tmp_path / "plain")["weights_sha256"]


def test_executions_of_several_steps(tmp_path):
    run(tmp_path / "run", profile="5:5", steps_per_execution=3)
    assert steps_in(tmp_path / "run") == {4}  # of the execution of the steps 4 to 6


@pytest.mark.parametrize("profile", ["17:19", "19:30"])
def test_steps_that_the_run_does_not_have(profile, tmp_path):
    with pytest.raises(OptionsError, match=f"--profile {profile}: the run has 18 steps"):
        run(tmp_path / "run", profile=profile)
    assert not (tmp_path / "run").exists()


def test_a_profile_that_cannot_be_written(tmp_path, monkeypatch):
    def full():
        raise tf.errors.ResourceExhaustedError(None, None, "No space left on device")

    profile = Profile(tmp_path, 1, 2)
    profile._runs = True
    monkeypatch.setattr(tf.profiler.experimental, "stop", full)
    with pytest.raises(CannotSave, match="profile in .* cannot be written: No space left"):
        profile.close()
    profile.close()  # once


def test_a_run_that_ends_early_writes_what_there_was(tmp_path, monkeypatch):
    from callbacks.stopping import StopAtStep

    stock = StopAtStep.on_step_end

    def failing(self, step, logs):
        if step == 8:
            raise ValueError("on purpose")
        stock(self, step, logs)

    monkeypatch.setattr(StopAtStep, "on_step_end", failing)
    with pytest.raises(ValueError, match="on purpose"):
        run(tmp_path / "run", profile="6:18")
    assert {6, 7} <= steps_in(tmp_path / "run")
    monkeypatch.undo()
    run(tmp_path / "other", profile="2:2")  # the profiler is free again
    assert steps_in(tmp_path / "other") == {2}
