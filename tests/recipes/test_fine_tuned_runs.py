"""Layer decay, averages, adapters and Muon: equal on two replicas, identical when resumed."""

import json

import numpy as np
import pytest

from tests.support import processes, strategy_run

RUNS = list(strategy_run.FINE_TUNED)
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    strategy_run.write_data(folder)
    for preset in ("classifier_DistilBert", "causal_GPT2"):
        strategy_run.write_preset(preset, folder)
    return folder


def train(folder, name, status=0, **options):
    options["runs"] = options.pop("runs", RUNS)
    words = (json.dumps(options), str(folder / name))
    processes.run_script("tests/support/strategy_run.py", *words, status=status)
    return folder / name


@pytest.fixture(scope="module")
def one_device(folder):
    return train(folder, "one", strategy="none")


def test_two_replicas_are_equal_to_one_device(folder, one_device):
    two = train(folder, "two", strategy="mirrored", replicas=2)
    for run in RUNS:
        processes.assert_equal_tensors(one_device / run, two / run)
        ours, theirs = processes.results(one_device / run), processes.results(two / run)
        assert theirs["replicas"] == 2 and ours["steps"] == theirs["steps"] == 20
        for group in ("history", "test"):
            for metric, value in ours[group].items():
                processes.assert_equal(
                    np.array(value), np.array(theirs[group][metric]), f"{run}: {metric}"
                )


@pytest.mark.parametrize("run", RUNS)
def test_a_stopped_run_resumes_identically(run, folder, one_device):
    """Stopped after step 7, behind an evaluation of the average in mid-epoch."""
    name = f"stopped-{run}"
    train(folder, name, status=75, strategy="none", stop_after=7, runs=[run])
    resumed = train(folder, name, strategy="none", runs=[run])
    ours, theirs = processes.results(one_device / run), processes.results(resumed / run)
    assert theirs["resumed_from_step"] == 7
    for key in ("weights_sha256", "history", "test", "steps"):
        assert ours[key] == theirs[key], key


def test_the_model_is_a_plain_preset_and_the_adapter_lies_beside_it(folder, one_device):
    """Adapter and preset together give the merged model's encoding."""
    import keras_nlp

    models, path = keras_nlp.models, one_device / "adapters" / "model"
    merged = models.TextClassifier.from_preset(str(path), dtype="float64")
    assert not any("lora" in weight.path for weight in merged.weights)
    backbone = models.Backbone.from_preset(
        str(folder / "presets" / "classifier_DistilBert"), dtype="float64"
    )
    ids = np.arange(5, 15, dtype=np.int32)[None]
    inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    before = np.asarray(backbone(inputs))
    backbone.load_lora_weights(str(path / "adapter.lora.h5"))
    after, expected = np.asarray(backbone(inputs)), np.asarray(merged.backbone(inputs))
    assert np.abs(after - before).max() > 1e-3
    np.testing.assert_allclose(after, expected, atol=1e-6)  # Keras keeps adapters in float32


def test_a_checkpoint_of_adapters_is_small(one_device):
    sizes = {
        run: (one_device / run / "checkpoints" / "step-00000020" / "model.weights.h5")
        for run in RUNS
    }
    names = processes.tensors_of(sizes["adapters"])
    assert not any("token" in name for name in names)
    assert sum(v.size for v in names.values()) < 0.5 * sum(
        v.size for v in processes.tensors_of(sizes["tuned"]).values()
    )
