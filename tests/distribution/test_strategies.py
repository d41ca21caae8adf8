"""What `auto` chooses, and what is refused before anything is built."""

import json

import pytest

from distribution import strategies
from distribution.errors import DistributionError


def tf_config(kind="worker", index=0, **tasks):
    cluster = {name: [f"127.0.0.1:{2000 + i}" for i in range(n)] for name, n in tasks.items()}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


@pytest.mark.parametrize(
    ("environ", "replicas", "expected"),
    [
        ({}, None, "none"),
        ({}, 1, "none"),
        ({}, 2, "mirrored"),
        (tf_config(worker=2), None, "multi_worker"),
        (tf_config(worker=2), 2, "multi_worker"),
        (tf_config(worker=1), None, "none"),
        (tf_config("chief", chief=1, worker=1), None, "multi_worker"),
        (tf_config("chief", chief=1, worker=2, ps=1), None, "parameter_server"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}, None, "multi_worker"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None, "none"),
        ({"TF_CONFIG": "{}"}, None, "none"),
    ],
)
def test_auto(environ, replicas, expected):
    assert strategies.resolve("auto", replicas, environ) == expected
    assert not strategies.faults(expected, replicas, environ)


@pytest.mark.parametrize("text", ["{", "[]", '{"cluster": {"worker": ["a:1"]}}'])
def test_a_broken_tf_config_is_named(text):
    with pytest.raises(DistributionError, match="TF_CONFIG must be JSON"):
        strategies.cluster_spec({"TF_CONFIG": text})


@pytest.mark.parametrize(
    ("name", "replicas", "environ", "words"),
    [
        ("none", 2, {}, "needs mirrored"),
        ("parameter_server", 2, tf_config("chief", chief=1, worker=1, ps=1), "--replicas"),
        ("parameter_server", None, {}, "needs a cluster with parameter servers"),
        ("mirrored", 2, tf_config(worker=2), "2 workers"),
        ("multi_worker", None, tf_config("chief", chief=1, worker=1, ps=1), "parameter servers"),
    ],
)
def test_what_does_not_go_together(name, replicas, environ, words):
    (found,) = strategies.faults(name, replicas, environ)
    assert words in found


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(strategy="mirrored", replicas=2, jit="on"), "XLA"),
        (dict(strategy="mirrored", replicas=3, global_batch_size=32), "cannot be shared"),
        (dict(strategy="none", replicas=2), "mirrored"),
    ],
)
def test_recipes_refuse_it_before_they_load_anything(options, words):
    from recipes import run
    from recipes.options import OptionsError, SharedOptions

    with pytest.raises(OptionsError, match=words):
        run.prepare(SharedOptions(**options))
