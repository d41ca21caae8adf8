"""Saves and loads a run's model; computes checksums; lists versions."""

import hashlib
import importlib.metadata
import inspect
import json
import re
import sys
import tempfile
import types
import zipfile
from pathlib import Path

import keras
import numpy as np

from callbacks.errors import saving
from data import files
from data.errors import DataError, first_line, is_out_of_memory
from distribution.keras_compat import hub_models
from machine import requirements
from training import numerics
from training.errors import RunError

KERAS_FILE = "model.keras"
CONFIG = "config.json"  # of the archive
ADAPTER = "adapter.lora.h5"
VERSIONS_OF = ("keras", "keras-nlp", "tensorflow", "tensorflow-text", "numpy")


def weights_sha256(model: keras.Model) -> str:
    """Computes a checksum of the trainable weights: dtypes, shapes and bytes, in order."""
    digest = hashlib.sha256()
    for variable in model.trainable_variables:
        value = np.ascontiguousarray(keras.ops.convert_to_numpy(variable))
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def data_sha256(splits: dict[str, tuple]) -> str:
    """Computes a checksum over all examples; it must stay the same when a run resumes.

    Args:
        splits: examples and answers per split name: NumPy arrays, lists of texts, or several of
            them in a dict, list or tuple. NumPy arrays of objects count as lists.

    Raises:
        DataError: a value is neither a number nor a text.
    """
    digest = hashlib.sha256()
    _add(digest, splits)
    return digest.hexdigest()


def _add(digest, part) -> None:
    """Adds names, dtypes, shapes and contents to a checksum, each with its length."""
    if isinstance(part, dict):
        for name in sorted(part):
            _add(digest, str(name))
            _add(digest, part[name])
    elif isinstance(part, str):
        content = part.encode(errors="surrogatepass")
        digest.update(f"text {len(content)} ".encode() + content)
    elif isinstance(part, list | tuple):
        digest.update(f"{len(part)} parts ".encode())
        for each in part:
            _add(digest, each)
    else:
        array = np.ascontiguousarray(part)
        if array.dtype.hasobject:  # its bytes are addresses
            if not (isinstance(part, np.ndarray) and part.ndim):
                raise DataError(f"data_sha256: {part!r} is neither a number nor a text")
            _add(digest, part.tolist())
            return
        digest.update(f"{array.dtype.str} {array.shape} ".encode())
        digest.update(array.reshape(-1).view(np.uint8))  # its bytes, without a copy


def save_model(
    model: keras.Model, folder: Path, *, metadata: dict, preprocessor=None, card: str = ""
) -> None:
    """Writes a model, atomically, so that it loads without this package.

    A KerasNLP task with a preprocessor becomes a preset (`from_preset(folder)`). Low-rank adapters
    are merged into their layers, and also stored alone (`backbone.load_lora_weights()`). Any other
    model becomes `folder/model.keras` (`keras.saving.load_model`). `SHA256SUMS` holds the checksum
    of each file.

    Args:
        model: the trained model.
        folder: a run's `model` folder.
        metadata: values that the model's inputs and outputs need, JSON.
        preprocessor: a KerasNLP preprocessor, or None.
        card: the text of `README.md`; "" for none.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    # In training it has no preprocessor, or `fit()` would tokenise. It is saved uncompiled: loading
    # would need our loss, and the optimizer's state is twice the size of the weights.
    optimizer, compiled = getattr(model, "optimizer", None), model.compiled
    model.optimizer, model.compiled = None, False
    try:
        with files.atomic(folder) as temporary:
            temporary.mkdir()
            if preprocessor is not None:
                model.preprocessor = preprocessor
                with hub_models.merge_adapters_in_full():
                    model.save_to_preset(str(temporary))
                _name_full_precision(temporary)
                model.preprocessor = None
                if any("lora_kernel" in weight.path for weight in model.trainable_variables):
                    # The preset holds the sum; these are the trained weights of the backbone.
                    hub_models.save_adapters(model.backbone, str(temporary / ADAPTER))
            else:
                with hub_models.merge_adapters_in_full():
                    model.save(temporary / KERAS_FILE)
            if getattr(getattr(preprocessor, "tokenizer", None), "splits_words", False):
                metadata = metadata | {files.SPLITS_WORDS: True}
            text = json.dumps(metadata, ensure_ascii=False, default=files.json_value)
            (temporary / files.METADATA).write_text(text, "utf-8")
            if card:
                (temporary / "README.md").write_text(card, encoding="utf-8")
            files.write_checksums(temporary)
    finally:
        model.optimizer, model.compiled = optimizer, compiled


def _name_full_precision(folder: Path) -> None:
    """Names float32 in a preset that was saved under a mixed policy.

    Its weights are float32, and KerasHub 0.32 cannot load a preset that names a mixed policy
    ("Invalid dtype"); whoever loads it chooses the policy.
    """
    for path in (folder / "config.json", folder / "task.json"):
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(r'"mixed_b?float16"', '"float32"', text), encoding="utf-8")


def require_saveable(model: keras.Model, folder: Path, options: type) -> None:
    """Saves and loads the model before training, to fail early if it cannot be saved.

    Args:
        model: the model. KerasNLP's own tasks are not tried.
        folder: for temporary files, which are removed.
        options: the recipe's `Options`, whose module's classes and functions may be in the model.

    Raises:
        RunError: the model cannot be saved or loaded.
    """
    if hasattr(model, "save_to_preset"):
        return
    trial = folder / ".trial"
    with saving(folder):
        files.remove(trial)  # of a start that was killed
        trial.mkdir()
        try:
            save_model(model, trial / "model", metadata={})
            load_model(trial / "model", None, sys.modules[options.__module__])
        except OSError:
            raise
        except Exception as error:  # any that get_config() or from_config() of the model raise
            if is_out_of_memory(error):
                raise
            reason = _first_sentence(error.__cause__ if isinstance(error, RunError) else error)
            remedy = (
                "a class of your own needs get_config() with all arguments of its constructor; it, "
                "or a function of your own, stands at the top level of the recipe's module, or is "
                "registered with keras.saving.register_keras_serializable()"
            )
            if "Python lambda" in reason:
                remedy = (
                    "instead of the lambda use functions of keras.ops on the layers' outputs, or a "
                    "layer or a function with a name at the top level of the recipe's module"
                )
            raise RunError(
                f"{type(model).__name__}, the model, cannot be saved and loaded again: {reason}; "
                f"{remedy}"
            ) from error
        finally:
            files.remove(trial)


def _first_sentence(error: BaseException | None) -> str:
    """Returns the first sentence of Keras's message, or of the one that it quotes."""
    text = " ".join(str(error).split()).rpartition("Exception encountered: ")[2]
    sentence = re.split(r"(?<=[.!?])\s", text)[0].rstrip(".")
    return (sentence if len(sentence) <= 300 else f"{sentence[:300]}...") or type(error).__name__


def load_model(
    folder: Path, dtype: str | None, module: types.ModuleType, trained_in: str | None = None
) -> keras.Model:
    """Loads the model that `save_model` wrote, uncompiled.

    Args:
        folder: a run's `model` folder.
        dtype: a dtype policy; None for the training's, or, for a preset, Keras's present one.
        module: the recipe, whose classes and functions may be in the model.
        trained_in: the dtype policy of the training, which layers that are created by a layer of
            the recipe take from Keras; None for Keras's present one.

    Raises:
        RunError: it cannot be loaded.
    """
    import keras_nlp  # its layers are found by name

    own = {name: value for name, value in vars(module).items() if inspect.isclass(value)}
    try:
        for name in _functions_of(folder):
            if inspect.isfunction(getattr(module, name, None)):
                own[name] = getattr(module, name)
        with keras.saving.custom_object_scope(own):
            if (folder / "task.json").is_file():
                name = json.loads((folder / "task.json").read_text("utf-8"))["class_name"]
                kind = getattr(keras_nlp.models, name)
                dtype = dtype or keras.config.dtype_policy().name
                task = kind.from_preset(str(folder), compile=False, dtype=dtype)
                text = (folder / files.METADATA).read_text("utf-8")
                if json.loads(text).get(files.SPLITS_WORDS):
                    hub_models.split_words(task.preprocessor.tokenizer)
                return task
            policy = dtype or trained_in or keras.config.dtype_policy().name
            with numerics.precision(policy):
                if dtype is None:
                    return keras.saving.load_model(folder / KERAS_FILE, compile=False)
                return _load_with_dtype(folder / KERAS_FILE, dtype)
    except Exception as error:  # any that a damaged archive, JSON or weights raise
        if is_out_of_memory(error):
            raise
        raise RunError(f"{folder}: cannot be loaded ({first_line(error)})") from error


def _functions_of(folder: Path) -> set[str]:
    """Returns the names of the functions that a saved model has, for instance as an activation.

    Keras would also take other functions of a recipe, where a layer names one of Keras's that is
    called like them: "zeros" for instance.
    """
    if not (folder / KERAS_FILE).is_file():
        return set()
    names = set()

    def note(part: dict) -> dict:
        if part.get("class_name") == "function":
            names.add(str(part.get("config")))
        return part

    with zipfile.ZipFile(folder / KERAS_FILE) as archive:
        json.loads(archive.read(CONFIG), object_hook=note)
    return names


def load_weights(model: keras.Model, path: Path) -> None:
    """Loads the weights of a checkpoint into the model that `load_model` returned.

    Args:
        model: the run's model.
        path: `model.weights.h5` of one of its checkpoints.

    Raises:
        RunError: they belong to another model.
    """
    try:
        model.load_weights(path)
    except Exception as error:  # any that HDF5, names or shapes raise
        if is_out_of_memory(error):
            raise
        raise RunError(
            f"{path}: cannot be loaded into {type(model).__name__} ({first_line(error)})"
        ) from error


def _load_with_dtype(path: Path, dtype: str) -> keras.Model:
    """Loads a `.keras` archive with another policy; vocabularies are among its other members."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        with zipfile.ZipFile(path) as source, zipfile.ZipFile(copy, "w") as target:
            for member in source.infolist():
                content = source.read(member)
                if member.filename == CONFIG:
                    config = _renamed(json.loads(content), dtype)
                    content = json.dumps(config).encode()
                target.writestr(member, content)
        return keras.saving.load_model(copy, compile=False)


def _renamed(config, dtype: str):
    """Returns a config with the floating-point policy of each layer replaced, and no other text."""
    if isinstance(config, list | tuple):
        return type(config)(_renamed(each, dtype) for each in config)
    if not isinstance(config, dict):
        return config
    policy = re.compile(r'"(float32|float64|mixed_b?float16)"')
    return {
        name: json.loads(policy.sub(f'"{dtype}"', json.dumps(value)))
        if name == "dtype"
        else _renamed(value, dtype)
        for name, value in config.items()
    }


def main_versions() -> dict[str, str]:
    """Returns the versions of this package, of Keras, KerasNLP and TensorFlow."""
    ours, packages = requirements.project(), versions()
    names = ("keras", "keras-nlp", "tensorflow")
    return {ours["name"]: ours["version"]} | {name: packages[name] for name in names}


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that affect the numbers."""
    packages = {name: importlib.metadata.version(name) for name in VERSIONS_OF}
    return {"python": sys.version.split()[0], **packages}
