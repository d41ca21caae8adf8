"""What a finished run leaves: its model, checksums, and what it was made with."""

import hashlib
import importlib.metadata
import os
import shutil
import sys
from pathlib import Path

import keras
import numpy as np

from data import checksums
from training.errors import RunError

VERSIONS_OF = ("keras", "keras-nlp", "tensorflow", "tensorflow-text", "numpy")


def weights_sha256(model: keras.Model) -> str:
    """A checksum over dtypes, shapes and bytes of the trained weights, in the model's order."""
    digest = hashlib.sha256()
    for variable in model.trainable_variables:
        value = np.ascontiguousarray(keras.ops.convert_to_numpy(variable))
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def data_sha256(splits: dict[str, tuple]) -> str:
    """A checksum over all examples; a run that resumes must find the same ones.

    Args:
        splits: by name, a tuple of NumPy arrays or lists of text.
    """
    digest = hashlib.sha256()
    for parts in splits.values():
        for part in parts:
            if isinstance(part, np.ndarray):
                digest.update(np.ascontiguousarray(part).tobytes())
            else:
                digest.update("\n".join(part).encode())
    return digest.hexdigest()


def save_model(model: keras.Model, folder: Path, preprocessor=None, card: str = "") -> None:
    """Writes a model so that it loads without this package; whole or not at all.

    A KerasNLP task with a preprocessor becomes a preset (`from_preset(folder)`), anything else
    `folder/model.keras` (`keras.saving.load_model`). `SHA256SUMS` names the checksum of each file.

    Args:
        model: the trained model.
        folder: a run's `model` folder.
        preprocessor: a KerasNLP preprocessor, or None.
        card: what its `README.md` says; "" for none.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    for left in folder.parent.glob(f".{folder.name}.*"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    try:
        if preprocessor is not None:
            _save_preset(model, temporary, preprocessor)
        else:
            temporary.mkdir()
            _save_keras_file(model, temporary / "model.keras")
        if card:
            (temporary / "README.md").write_text(card, encoding="utf-8")
        checksums.write(temporary)
        checksums.put_in_place(temporary, folder)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _save_preset(model: keras.Model, folder: Path, preprocessor) -> None:
    # Without its preprocessor in training, or `fit()` would tokenise. Without its optimizer here,
    # whose state, twice the size of the weights, Keras would put beside the head.
    optimizer, model.optimizer = model.optimizer, None
    model.preprocessor = preprocessor
    try:
        model.save_to_preset(str(folder))
    finally:
        model.preprocessor, model.optimizer = None, optimizer


def _save_keras_file(model: keras.Model, path: Path) -> None:
    # A copy that was never compiled: our loss and schedule would have to be imported to be loaded.
    copy = type(model).from_config(model.get_config())
    copy.set_weights(model.get_weights())
    copy.save(path)


def load_keras_file(folder: Path) -> keras.Model:
    """The model of a run's `model` folder that is no preset, never compiled.

    Raises:
        RunError: it cannot be loaded.
    """
    path = folder / "model.keras"
    try:
        return keras.saving.load_model(path, compile=False)
    except Exception as error:  # whatever the archive, its JSON or its weights give rise to
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RunError(f"{path}: cannot be loaded ({first[:200]})") from error


def versions() -> dict[str, str]:
    """What the results were made with."""
    found = {name: importlib.metadata.version(name) for name in VERSIONS_OF}
    return {"python": sys.version.split()[0], **found}
