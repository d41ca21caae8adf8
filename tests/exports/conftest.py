import importlib
import json

import pytest

from tests.support import strategy_run

PRECISION = {"bert": "float32", "text": "float32", "mnist": "float64", "dna": "mixed_bfloat16"}


class Runs(dict):
    """Folders of finished runs by name, each trained for three steps when it is first asked for."""

    def __init__(self, root):
        super().__init__()
        self.root = root
        strategy_run.write_data(root)

    def __missing__(self, name):
        module, options = strategy_run.RUNS["bert_packed" if name == "bert" else name]
        recipe = importlib.import_module(f"recipes.{module}")
        more = dict(run_dir=self.root / name, cache_dir=self.root / "cache")
        more |= dict(precision=PRECISION[name], max_steps=3, epochs=1)
        more |= strategy_run.data_options(module, self.root)
        recipe.main(recipe.Options(**(options | more)))
        return self.setdefault(name, self.root / name)


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """A finished run of each recipe; not to be changed."""
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def load(runs):
    """What is exported of a run: a new model each time, since an exporter may change it."""
    from exports import trained

    def call(name):
        run, results, metadata = (
            json.loads((runs[name] / file).read_text())
            for file in ("options.json", "results.json", "model/recipe.json")
        )
        return trained.load(runs[name], run, results | metadata)

    return call
