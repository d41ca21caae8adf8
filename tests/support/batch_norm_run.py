"""Trains a model with synchronised batch normalisation on one replica, and on two.

python tests/support/batch_norm_run.py FOLDER '{"epochs": 1}'
"""

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import recipes  # noqa: E402, F401 (picks the backend)


def build(options):
    import keras

    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.BatchNormalization(momentum=0.5, synchronized=True),
            keras.layers.Dense(2),
        ]
    )


if __name__ == "__main__":
    folder, given = Path(sys.argv[1]), json.loads(sys.argv[2])
    if len(sys.argv) == 3:  # a process for each number of replicas
        for name, more in (("one", {}), ("two", {"strategy": "mirrored", "replicas": 2})):
            words = [sys.executable, __file__, str(folder / name), json.dumps(given | more), "-"]
            subprocess.run(words, check=True, env=os.environ)
    else:
        from tests.support import tiny_recipe

        options = tiny_recipe.Options(run_dir=folder, lr_scaling="none", **given)
        tiny_recipe.main(options, build=build)
