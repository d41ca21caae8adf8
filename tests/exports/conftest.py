import importlib
import json

import pytest

from tests.support import strategy_run

SHORT = dict(max_steps=3, epochs=1)


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """A finished run of each recipe, three steps long, some in float64; not to be changed."""
    root = tmp_path_factory.mktemp("runs")
    strategy_run.write_data(root)
    made = {}
    for name, precision in (
        *(("bert", "float32"), ("text", "float32"), ("mnist", "float64")),
        ("dna", "mixed_bfloat16"),
    ):
        module, options = strategy_run.RUNS[name]
        recipe = importlib.import_module(f"recipes.{module}")
        more = dict(run_dir=root / name, cache_dir=root / "cache", precision=precision)
        more |= strategy_run.data_options(module, root) | SHORT
        recipe.main(recipe.Options(**(options | more)))
        made[name] = root / name
    return made


@pytest.fixture(scope="session")
def load(runs):
    """What is exported of a run: a new model each time, since an exporter may change it."""
    from exports import trained

    def call(name):
        run, results = (
            json.loads((runs[name] / file).read_text()) for file in ("options.json", "results.json")
        )
        return trained.load(runs[name], run, results)

    return call
