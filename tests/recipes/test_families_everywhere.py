"""Each family gives the same numbers wherever it is fine-tuned, dropout included, and resumes."""

import json
import math

import numpy as np
import pytest

from data.errors import DataError
from models import decoders, encoder_decoders, presets
from recipes import evaluate
from tests.support import causal_presets, processes, strategy_run
from training.loaded_run import load_run

pytestmark = pytest.mark.long

ALL = list(strategy_run.FAMILIES)
SCRIPT = "tests/support/strategy_run.py"
STRATEGIES = {
    "none": (1, {"strategy": "none"}),
    "mirrored x 2": (1, {"strategy": "mirrored", "replicas": 2}),
    "2 workers": (2, {"strategy": "multi_worker"}),
    "recomputed": (1, {"strategy": "none", "gradient_checkpointing": True}),
}
ON_TWO_WORKERS = ("classifier_DistilBert", "classifier_Roberta", "causal_GPT2", "causal_Llama3")
# KerasHub computes Gemma's norms in float32, scales included: their gradients are sums over a
# replica's tokens that round differently (2e-8 was seen on one processor, 1.4e-5 on another).
GEMMAS = ("causal_Gemma", "causal_Gemma2", "causal_Gemma3", "seq2seq_T5Gemma")
TOLERANCES = dict.fromkeys(GEMMAS, 1e-4)
# One replica only, or float32 only.
FLOAT32 = [f"causal_{family}" for family in causal_presets.PRECISION]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request):
    """A folder with the data, and the presets of the families that are asked for."""
    folder = tmp_path_factory.mktemp("families")
    strategy_run.write_data(folder)
    for name in chosen(request):
        strategy_run.write_preset(name, folder)
    return folder


def chosen(request, strategy=None) -> list[str]:
    """The families of the tests that are run, under a strategy or at all."""
    params = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    found = {
        asked["family"] for asked in params if strategy in (None, "none", asked.get("strategy"))
    }
    return [name for name in ALL if name in found]


def train(name, folder, workers=1, status=0, **options):
    """Trains families under a strategy; returns their folder."""
    output = folder / name.replace(" ", "-")
    words = (json.dumps(options), str(output))
    if workers == 1:
        processes.run_script(SCRIPT, *words, status=status)
    else:
        processes.launch(workers, "strategy_run", *words, logs=output)
    return output


@pytest.fixture(scope="module")
def trained(folder, request):
    """Trains what is asked for under each strategy, once and in one process."""
    done = {}

    def under(strategy):
        if strategy not in done:
            workers, options = STRATEGIES[strategy]
            runs = chosen(request, strategy)
            done[strategy] = train(strategy, folder, workers, **options, runs=runs)
        return done[strategy]

    return under


@pytest.mark.parametrize(
    ("family", "strategy"),
    [(name, "mirrored x 2") for name in ALL if name not in FLOAT32]
    + [(name, "2 workers") for name in ON_TWO_WORKERS],
)
def test_it_is_equal_under_every_strategy(family, strategy, trained):
    one, other = trained("none") / family, trained(strategy) / family
    ours, theirs = processes.results(one), processes.results(other)
    assert theirs["replicas"] == 2 and theirs["steps"] == ours["steps"] == 5
    tolerance = TOLERANCES.get(family, 1e-9)
    difference = processes.assert_equal_tensors(one, other, tolerance)
    for group in ("history", "test"):
        for metric, value in ours[group].items():
            values = np.array(value), np.array(theirs[group][metric])
            name = f"{family}: {metric}"
            difference = max(difference, processes.assert_equal(*values, name, tolerance))
    print(f"{family}, {strategy}: {difference:.1e}")


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("strategy", ["recomputed"])
def test_layers_that_are_computed_twice_give_the_same_numbers(family, strategy, trained):
    one, other = trained("none") / family, trained(strategy) / family
    tolerance = 1e-4 if family in FLOAT32 else 1e-9
    if family in GEMMAS:  # TensorFlow's graph optimizer rounds their float32 norms differently
        tolerance = 1e-2
    difference = processes.assert_equal_tensors(one, other, tolerance)
    print(f"{family}, {strategy}: {difference:.1e}")


@pytest.mark.parametrize(
    ("family", "strategy"),
    [(name, "none") for name in ALL] + [(name, "mirrored x 2") for name in ON_TWO_WORKERS],
)
def test_it_resumes_bit_for_bit_after_a_kill(family, strategy, trained, folder):
    """Killed after step 3, in mid-epoch; the checkpoint is that of step 2."""
    whole, name = trained(strategy) / family, f"{strategy} killed"
    _, options = STRATEGIES[strategy]
    train(name, folder, **options, runs=[family], kill_after=3, status=-9)
    resumed = processes.results(train(name, folder, **options, runs=[family]) / family)
    assert resumed["resumed_from_step"] == 2
    assert resumed["weights_sha256"] == processes.results(whole)["weights_sha256"]


def test_a_router_s_family_is_refused_on_two_replicas(tmp_path):
    """Also in accumulated batches, which one process can try."""
    strategy_run.write_data(tmp_path)
    strategy_run.write_preset("causal_QwenMoe", tmp_path)
    recipe, options = strategy_run.recipe_of(
        "causal_QwenMoe", tmp_path / "runs", strategy="none", accumulate_steps=2
    )
    with pytest.raises(DataError, match="adds a loss.* leave out --accumulate-steps"):
        recipe.main(options)


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("family", ALL)
def test_it_trains_in_half_precision(family, precision, folder):
    """The loss is finite; what is saved is evaluated and answers. Some families are refused."""
    recipe, options = strategy_run.recipe_of(
        family, folder / precision, precision=precision, strategy="none"
    )
    name = family.split("_", 1)[1]
    if f"{name}CausalLM" in decoders.NOT_IN_HALF or f"{name}Backbone" in presets.NOT_IN_HALF:
        with pytest.raises(DataError, match=f"fails in {precision}; pass --precision float32"):
            recipe.main(options)
        return
    if f"{name}Seq2SeqLM" in encoder_decoders.NOT_IN_FLOAT16 and precision == "mixed_float16":
        with pytest.raises(DataError, match="fails in mixed_float16; pass --precision mixed_bf"):
            recipe.main(options)
        return
    results = recipe.main(options)
    assert results["steps"] == 5 and results["precision"] == precision
    assert all(math.isfinite(value) for value in results["history"]["loss"])
    found = evaluate.main(evaluate.Options(run_dir=options.run_dir, cache_dir=options.cache_dir))
    assert found["test"] == pytest.approx(results["test"], rel=1e-3)
    (answer,) = recipe.predict(load_run(options.run_dir), ["a good film"])
    assert answer
