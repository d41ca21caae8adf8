"""Finds the model and the weights of `--init-from`."""

import json
from pathlib import Path
from typing import NamedTuple

import keras
import keras_nlp

from data import files
from data.errors import DataError, first_line, is_out_of_memory
from data.files import STATE, WEIGHTS


class Source(NamedTuple):
    """A model on disk.

    Attributes:
        preset: the folder of a KerasNLP preset, or the name of one.
        weights: weights that replace those of the preset, or None.
    """

    preset: str
    weights: Path | None


def preset_of(path: Path) -> str:
    """Returns the preset of `--init-from`, see `source_of`.

    Args:
        path: a finished run, its `best/`, one of its checkpoints, or a weights file of these.

    Raises:
        DataError: it is none of them, or damaged.
    """
    path = files.expand(path)
    if (path / "model" / "config.json").is_file():
        return str(path / "model")
    weights = _weights_in(path)
    if weights is None:
        raise DataError(
            f"--init-from {path}: holds no model; pass a finished run of bert_mlm, its best/, a "
            "checkpoint or a weights file of these"
        )
    if _run_of(weights) is None:
        raise DataError(
            f"--init-from {path}: is not in the folder of a finished run, whose model/ has the "
            "vocabulary and the sizes"
        )
    problem = files.damage(weights.parent, [WEIGHTS])
    if problem:
        raise DataError(f"--init-from {path}: damaged ({problem})")
    source_of(str(path))
    return str(path)


def source_of(preset: str) -> Source:
    """Returns the preset, and the weights if the path is a checkpoint.

    Raises:
        DataError: the checkpoint does not hold the model that was tested.
    """
    weights = _weights_in(Path(preset))
    if weights is None:
        return Source(preset, None)
    run = _run_of(weights)
    if run is None:
        return Source(preset, None)
    option = _partly_saved_with(run, weights.parent)
    if option is not None:
        raise DataError(
            f"{preset}: its run was trained with {option}, so its checkpoints serve to resume "
            f"only; pass {run / 'model'}"
        )
    return Source(str(run / "model"), weights)


def _partly_saved_with(run: Path, checkpoint: Path) -> str | None:
    """Returns what makes the checkpoints of a run lack a part, or the averages, of the model."""
    state = files.json_object(checkpoint / STATE)
    if state.get("averages"):  # of an optimizer's own `use_ema`, without the option, too
        return "averages of its weights"
    try:
        options = json.loads((run / "options.json").read_text(encoding="utf-8"))["options"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    for name in files.NOT_WHOLE_WITH:
        if options.get(name):
            return f"--{name.replace('_', '-')}"
    return None


def load_checkpoint(model: keras.Model, weights: Path) -> None:
    """Loads a checkpoint's weights into a model of its run.

    Raises:
        DataError: they belong to another model.
    """
    try:
        model.load_weights(weights)
    except Exception as error:  # whatever HDF5, missing names or wrong shapes raise
        if is_out_of_memory(error):
            raise
        raise DataError(f"{weights}: cannot be loaded ({first_line(error)})") from error


def load_encoder(backbone: keras.Model, source: Source) -> None:
    """Loads the encoder's weights of a checkpoint into a backbone of its run's preset.

    Raises:
        DataError: they belong to another model.
    """
    if source.weights is None:
        return
    content = json.loads((Path(source.preset) / "task.json").read_text(encoding="utf-8"))
    kind = getattr(keras_nlp.models, content["class_name"])
    task = kind.from_preset(source.preset, compile=False)
    load_checkpoint(task, source.weights)
    backbone.set_weights(task.backbone.get_weights())


def _weights_in(path: Path) -> Path | None:
    """Returns the weights file of a checkpoint's folder, or the weights file itself; else None."""
    if path.is_file() and path.name.endswith(".weights.h5"):
        return path
    is_checkpoint = (path / WEIGHTS).is_file() and (path / STATE).is_file()
    return path / WEIGHTS if is_checkpoint else None


def _run_of(weights: Path) -> Path | None:
    """Returns the folder of the finished run that a checkpoint belongs to, or None."""
    for folder in list(weights.resolve().parents)[1:3]:  # RUN/best, RUN/checkpoints/step-...
        if (folder / "model" / "config.json").is_file():
            return folder
    return None
