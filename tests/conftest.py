"""Every test runs on the CPU, with the TensorFlow backend, and without a network."""

import gc
import json
import os
import sys
import types

import hypothesis
import pytest

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

from machine.cores import cores  # noqa: E402
from tests.support import strategy_run  # noqa: E402

# A run of recipes.bert_mlm that takes a few seconds: 40 steps in 2 epochs, float32, with dropout.
TINY_RUN = strategy_run.TINY_TEXT | dict(
    strategy="none",
    precision="float32",
    lr_scaling="linear",
    jit="auto",
    dropout=0.1,
    max_examples=160,
    max_steps=None,
)


# The same examples in each run, and nothing is written into the checkout.
hypothesis.settings.register_profile(
    "recipes", max_examples=30, deadline=None, derandomize=True, database=None
)
hypothesis.settings.load_profile("recipes")


def pytest_xdist_auto_num_workers(config):
    """One process more than cores, since some wait for others; as many as fit into the memory."""
    # Models of all families, one after the other in a process, fill more of it.
    gigabytes = 6 if config.option.markexpr.startswith("long") else 3
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(cores() + 1, memory // (gigabytes * 2**30)))


# Processes share the files; one that begins a long file last would keep the others waiting.
LONGEST = (
    *("test_families_everywhere.py", "test_equality.py", "test_plain_keras.py", "test_step.py"),
    *("test_run.py", "test_loaded_runs.py", "test_what_is_trained.py", "test_resume.py"),
    *("test_families.py", "test_causal_families.py", "test_fine_tuned_runs.py"),
    *("test_model_checks.py", "test_fit_checks.py", "test_data_checks.py"),
    *("test_transformers_format.py", "test_text_classification.py", "test_chunked_head.py"),
)


def pytest_collection_modifyitems(items):
    """The longest files come first."""
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(LONGEST)))


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_session(tmp_path_factory):
    """No test reads or writes the cache of the person who runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECIPES_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def pytest_collection_finish():
    """Looks for garbage less often, and not in what the tests have imported.

    Each search of all objects takes long once TensorFlow and Keras are among them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.fixture(scope="session", autouse=True)
def no_graph_optimizer():
    """In this process, TensorFlow executes graphs as they were traced.

    Optimizing one takes a sixth of the time of a run of a few steps. The processes that tests start
    do it, as a user's do.
    """
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


@pytest.fixture(autouse=True)
def float32_again():
    """A test in another precision leaves nothing behind."""
    yield
    if "keras" in sys.modules:
        import keras

        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory):
    """A text file in which words follow from each other."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    strategy_run.write_text(path)
    return path


@pytest.fixture(scope="session")
def run_bert(tiny_text):
    """Runs recipes.bert_mlm in this process: the tiny run, with other options where given.

    Returns its folder, results, options, model, and the lines of its log.
    """
    import recipes.bert_mlm

    def run(folder, **changes):
        models = []
        stock = recipes.bert_mlm.build_model

        def build_model(*arguments):
            models.append(stock(*arguments))
            return models[-1]

        recipes.bert_mlm.build_model = build_model
        try:
            options = recipes.bert_mlm.Options(
                **(TINY_RUN | dict(dataset=str(tiny_text), run_dir=folder) | changes)
            )
            results = recipes.bert_mlm.main(options)
        finally:
            recipes.bert_mlm.build_model = stock
        return types.SimpleNamespace(
            folder=folder,
            results=results,
            options=options,
            model=models[0] if models else None,
            log=(folder / "worker-0.log").read_text(),
            records=[json.loads(line) for line in open(folder / "metrics.jsonl")],
        )

    return run


@pytest.fixture(scope="session")
def tiny_run(run_bert, tmp_path_factory):
    """The tiny run, done once; its folder must not be changed."""
    return run_bert(tmp_path_factory.mktemp("tiny") / "run")


@pytest.fixture
def command_line(monkeypatch, capsys):
    """Runs a recipe as its command line does, in this process: (exit status, stdout, stderr)."""
    from training.command_line import command_line as run

    def call(module, *arguments, main=None):
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            run(module.Options, main or module.main)
        captured = capsys.readouterr()
        return left.value.code, captured.out, captured.err

    return call
