"""BERT from scratch on two workers, with and without a parameter server, in earnest.

The figures are printed: `pytest -m long -s tests/distribution/test_long_training.py`.
"""

import os

import pytest

from tests.support import processes

pytestmark = pytest.mark.long

# Four epochs. A synchronous step takes 16 examples on each of two workers, an asynchronous one 16
# on one of them: two of these make the same number of examples. Rates by the root of the batch.
STEPS = int(os.environ.get("LONG_TRAINING_STEPS", 1032))
RATE = 1.06e-3  # for 16 examples; 1.5e-3 for 32


def train(folder, *options, **recipe):
    run_dir = folder / "-".join(["run", *options])
    words = ["recipes.bert_mlm", "--dataset", "installed-docs", "--preset", "scratch"]
    words += ["--dropout", "0.1", "--base-learning-rate", str(RATE)]
    words += ["--cache-dir", str(folder / "cache"), "--run-dir", str(run_dir)]
    for name, value in recipe.items():
        words += ["--" + name.replace("_", "-"), str(value)]
    processes.launch(2, *words, logs=run_dir, options=options, timeout=1500)
    results = processes.results(run_dir)
    print(
        f"{results['strategy']}: test cross-entropy {results['test']['cross_entropy']:.3f}, "
        f"unigram {results['baseline']['unigram_cross_entropy']:.3f}, {results['steps']} steps of "
        f"{results['global_batch_size']} at {results['learning_rate']}, "
        f"{results['tokens_per_second']:.0f} tokens/s"
    )
    return results


def test_both_beat_the_unigram_model_and_end_close_to_each_other(tmp_path):
    synchronous = train(tmp_path, batch_size_per_replica=16, lr_scaling="sqrt", max_steps=STEPS)
    asynchronous = train(
        tmp_path, "--ps", "1", global_batch_size=16, lr_scaling="none", max_steps=2 * STEPS
    )
    assert synchronous["strategy"] == "multi_worker"
    assert asynchronous["strategy"] == "parameter_server"
    examples = [r["steps"] * r["global_batch_size"] for r in (synchronous, asynchronous)]
    assert examples == [32 * STEPS] * 2
    losses = [r["test"]["cross_entropy"] for r in (synchronous, asynchronous)]
    unigram = synchronous["baseline"]["unigram_cross_entropy"]
    assert max(losses) < unigram - 0.2
    assert abs(losses[0] - losses[1]) < 0.1
