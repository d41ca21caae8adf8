"""BERT from scratch on two workers, with and without a parameter server, in earnest.

The figures are printed: `pytest -m long -s tests/distribution/test_long_training.py`.
"""

import os

import pytest

from tests import processes

pytestmark = pytest.mark.long

STEPS = int(os.environ.get("LONG_TRAINING_STEPS", 500))


def train(folder, *options):
    run_dir = folder / "-".join(["run", *options])
    words = ["recipes.bert_mlm", "--dataset", "installed-docs", "--preset", "scratch"]
    words += ["--max-steps", str(STEPS), "--dropout", "0.1", "--base-learning-rate", "1e-3"]
    words += ["--cache-dir", str(folder / "cache"), "--run-dir", str(run_dir)]
    processes.launch(2, *words, logs=run_dir, options=options, timeout=1500)
    results = processes.results(run_dir)
    print(
        f"{results['strategy']}: test cross-entropy {results['test']['cross_entropy']:.3f}, "
        f"unigram {results['baseline']['unigram_cross_entropy']:.3f}, {results['steps']} steps of "
        f"{results['global_batch_size']}, {results['tokens_per_second']:.0f} tokens/s"
    )
    return results


def test_both_beat_the_unigram_model_and_end_close_to_each_other(tmp_path):
    synchronous = train(tmp_path)
    asynchronous = train(tmp_path, "--ps", "1")
    assert synchronous["strategy"] == "multi_worker"
    assert asynchronous["strategy"] == "parameter_server"
    assert synchronous["steps"] == asynchronous["steps"] == STEPS
    assert synchronous["global_batch_size"] == asynchronous["global_batch_size"] == 64
    losses = [r["test"]["cross_entropy"] for r in (synchronous, asynchronous)]
    unigram = synchronous["baseline"]["unigram_cross_entropy"]
    assert max(losses) < unigram - 0.2
    assert abs(losses[0] - losses[1]) < 0.1
