"""Saves and restores variables as they are, also those that Keras merges when it saves them."""

from collections.abc import Callable
from pathlib import Path

import keras

from distribution.errors import DistributionError
from distribution.keras_compat import hub_models, inspection

FILE = "adapters.weights.h5"  # beside the file of `save_weights()`


class Variables(keras.layers.Layer):
    """Saves and loads variables by their numbers.

    Args:
        variables_of: returns them; as attributes they would be tracked by this layer.
    """

    def __init__(self, variables_of: Callable[[], list[keras.Variable]]):
        super().__init__(name="variables")
        self.variables_of = variables_of
        self.built = True

    def save_own_variables(self, store):
        """Writes them."""
        for index, variable in enumerate(self.variables_of()):
            store[str(index)] = keras.ops.convert_to_numpy(variable)

    def load_own_variables(self, store):
        """Reads them."""
        for index, variable in enumerate(self.variables_of()):
            variable.assign(store[str(index)])


def save_weights(model: keras.Model, path: Path) -> None:
    """Saves the weights of a model by its `save_weights()`, and low-rank adapters as they are.

    Breaks: Keras writes the kernel of a layer with `enable_lora()` plus the product of its
    adapters, and loads adapters of zero (keras-hub#2701, open). Does: writes the variables of such
    layers to a second file, `FILE`.

    Args:
        model: built.
        path: of the file that Keras writes.
    """
    with hub_models.merge_adapters_in_full():
        model.save_weights(path)
    if _merged(model):
        keras.saving.save_weights(Variables(lambda: _merged(model)), path.with_name(FILE))


def load_weights(model: keras.Model, path: Path) -> None:
    """Loads what `save_weights()` has saved.

    Args:
        model: built.
        path: of the file that Keras wrote.

    Raises:
        DistributionError: there are adapters, and no file of them.
    """
    model.load_weights(path)
    if _merged(model):
        if not path.with_name(FILE).exists():
            raise DistributionError(
                f"{path.parent}: has no {FILE}, since an earlier version wrote it; adapters would "
                "begin at zero: pass another --run-dir"
            )
        keras.saving.load_weights(Variables(lambda: _merged(model)), path.with_name(FILE))


def _merged(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables of layers with adapters, unless the model saves them in its own way."""
    if "save_weights" in vars(model):  # by models.fine_tuning.save_only_trained()
        return []
    layers = [e for e in inspection.layers_of(model) if getattr(e, "lora_enabled", False)]
    return [variable for layer in layers for variable in layer.variables]
