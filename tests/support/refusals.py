"""Runs the tiny recipe as it must not be, and returns what is said."""

import pytest

from tests.support import tiny_recipe
from training.errors import RunError


def refused(folder, error=RunError, arguments=None, parts=None, **options):
    """The message of a recipe that must not train; nothing of it may be left."""

    def changed(options, learning_rate):
        return tiny_recipe.compile_arguments(options, learning_rate) | (arguments or (lambda: {}))()

    with pytest.raises(error) as caught:
        chosen = tiny_recipe.Options(run_dir=folder / "run", **options)
        tiny_recipe.main(chosen, arguments=changed, **(parts or {}))
    assert not (folder / "run").exists()
    return str(caught.value)
