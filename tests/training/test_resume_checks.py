"""Rejects another model, optimizer or metrics than the checkpoint's."""

import keras
import pytest

from tests.support import tiny_recipe
from training.errors import RunError


class TestResume:
    def test_one_that_has_changed_since(self, stopped_at_four):
        folder, options = stopped_at_four
        with pytest.raises(RunError, match="cannot resume: the model has changed") as caught:
            tiny_recipe.main(options, build=lambda options: wider_model())
        assert len(str(caught.value).splitlines()) == 1
        assert "kernel was (6, 8), is now (6, 9)" in str(caught.value)

    @pytest.mark.parametrize(
        "optimizer, said",
        [
            (lambda: keras.optimizers.SGD(0.01), r"it was Adam, is now SGD"),
            (lambda: keras.optimizers.Adam(0.01, amsgrad=True), r"it had \d+ variables, now has"),
        ],
    )
    def test_another_optimizer(self, stopped_at_four, optimizer, said):
        """Keras only warns, and begins again with its moments."""

        def arguments(options, rate):
            return tiny_recipe.compile_arguments(options, rate) | {"optimizer": optimizer()}

        with pytest.raises(RunError, match=f"the optimizer has changed since .{said}") as caught:
            tiny_recipe.main(stopped_at_four[1], arguments=arguments)
        assert len(str(caught.value).splitlines()) == 1

    def test_other_metrics_within_an_epoch(self, stopped_at_four):
        def arguments(options, rate):
            return tiny_recipe.compile_arguments(options, rate) | {"metrics": []}

        with pytest.raises(RunError, match="cannot resume within an epoch: the metrics") as caught:
            tiny_recipe.main(stopped_at_four[1], arguments=arguments)
        assert len(str(caught.value).splitlines()) == 1


def wider_model():
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(9), keras.layers.Dense(2)])
