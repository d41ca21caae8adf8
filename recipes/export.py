"""Export a trained model: TensorFlow SavedModel, ONNX, LiteRT, Hugging Face.

    python -m recipes.export RUN_DIR --to saved_model
    python -m recipes.export RUN_DIR --to huggingface --folder my-bert

RUN_DIR is the folder of a finished run of any recipe. The `saved_model` of a BERT takes texts, as
strings. `huggingface` supports BERTs and causal language models of some families. All other exports
have the inputs and outputs of the Keras model. The export is run and compared with the Keras model
(`--no-check` skips that); if its outputs differ, nothing is kept. The formats: docs/export.md.
"""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Literal

import keras
import keras_nlp
import safetensors
import tensorflow as tf

from data import files
from data.errors import first_line
from exports import huggingface, keras_formats, texts
from exports.comparison import Differs, symbolic_inputs
from training.command_line import command_line
from training.errors import OptionsError, RunError
from training.loaded_run import LoadedRun, load_run
from training.options import RunOptions, check, option

# Packages that a format needs beyond this package's own; all of them are in the extra.
NEEDS = {"onnx": ("onnx", "tf2onnx", "onnxruntime")}
# Formats that lack operations which some models need.
LACKING_OPERATIONS = ("onnx", "litert")
# Further packages that the comparison needs.
COMPARED_WITH = {"huggingface": ("transformers", "torch")}


@dataclasses.dataclass(kw_only=True)
class Options(RunOptions):
    """Options of `recipes.export`."""

    to: Literal["saved_model", "onnx", "litert", "huggingface"] = option(
        help="Format of the export."
    )
    folder: Path | None = option(
        None, "A new folder for the export (default: exports/<format> in the run's folder)."
    )
    check: bool = option(
        True, "Run the export, and keep it only if its outputs equal the Keras model's."
    )


def main(options: Options) -> Path:
    """Exports a run's model.

    Returns:
        The folder of the export.
    """
    check(options)
    run = load_run(options.run_dir, best=options.best, trust_module=options.trust_module)
    folder = options.folder or options.run_dir / "exports" / options.to
    if folder.exists():
        raise OptionsError(f"--folder: {folder} already exists; remove it, or name a new one")
    model = run.load_model("float32")
    tasks = keras_nlp.models.BertMaskedLM, keras_nlp.models.BertTextClassifier
    is_bert = run.preset is not None and isinstance(model, tasks)
    is_causal = run.preset is not None and isinstance(model, keras_nlp.models.CausalLM)
    if options.to == "huggingface" and isinstance(model, keras_nlp.models.Seq2SeqLM):
        raise OptionsError(f"--to huggingface: KerasHub does not write {type(model).__name__}")
    takes_texts = is_bert and run.options.EXPORT_TAKES_TEXTS
    if options.to == "huggingface" and not is_bert and not is_causal:
        raise OptionsError(
            f"--to huggingface: the model of {options.run_dir} is neither a BERT nor a CausalLM of "
            "KerasNLP"
        )
    missing = not_installed(NEEDS.get(options.to, ()))
    if missing:
        raise OptionsError(
            f"--to {options.to}: needs {', '.join(missing)}; pip install -e '.[export]' has them"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with files.atomic(folder) as temporary:
            note = write(model, temporary, options, run, takes_texts)
            compared = compare(model, temporary, options, run if takes_texts else None)
            files.write_checksums(temporary)
    except OSError as error:
        raise RunError(f"--folder {folder}: {error.strerror or error}") from error
    except Differs as error:
        raise RunError(f"--to {options.to}: {error}; nothing is kept") from error
    except Exception as error:  # whatever a writer or the program of a format raises
        if options.to not in LACKING_OPERATIONS and (is_bert or is_causal):
            raise
        raise RunError(
            f"--to {options.to}: {type(model).__name__} cannot be written or run in this format "
            f"({first_line(error)}); nothing is kept"
        ) from error
    print(f"{options.to:12} {folder}\n{'':12} {note}\n{'compared':12} {compared}")
    return folder


def write(
    model: keras.Model, folder: Path, options: Options, run: LoadedRun, takes_texts: bool
) -> str:
    """Writes an export.

    Args:
        model: the run's model in float32.
        folder: does not exist yet.
        options: the format.
        run: the run.
        takes_texts: whether the model is a BERT whose SavedModel takes texts.

    Returns:
        One line or more that describe the export.

    Raises:
        DataError: the format does not have the model's family.
        OSError: the folder cannot be written.
    """
    classes, several = run.metadata.get("classes", ()), run.metadata.get("several", False)
    try:
        if options.to == "huggingface" and isinstance(model, keras_nlp.models.CausalLM):
            return huggingface.write_causal_lm(model, folder, run.metadata.get("template"))
        if options.to == "huggingface":
            return huggingface.write(model, folder, classes, several)
        if options.to == "saved_model" and takes_texts:
            pairs = run.metadata.get("pairs", False)
            return texts.write(model, folder, str(run.preset), classes, pairs, several)
        return keras_formats.write(model, folder, options.to)
    except (safetensors.SafetensorError, tf.errors.OpError) as error:
        if options.to in LACKING_OPERATIONS:
            raise
        # On a full disk, for instance, where others raise OSError.
        raise OSError(f"cannot be written ({first_line(error)}); nothing is kept") from error


def compare(model: keras.Model, folder: Path, options: Options, run: LoadedRun | None) -> str:
    """Compares an export with the Keras model.

    Args:
        model: the exported model.
        folder: the export.
        options: the format, and whether to compare.
        run: the run of a BERT whose SavedModel takes texts, or None.

    Returns:
        One line: the largest difference, or why they were not compared.

    Raises:
        Differs: the export's outputs differ.
        RunError: `transformers` cannot load or run it.
    """
    missing = not_installed(COMPARED_WITH.get(options.to, ()))
    if not options.check:
        return "no (--no-check)"
    if missing:
        return f"no: needs {', '.join(missing)}"
    if options.to == "huggingface":
        largest = compare_with_transformers(model, folder)
    elif options.to == "saved_model" and run is not None:
        several = run.metadata.get("several", False)
        largest = texts.compare(model, folder, str(run.preset), several)
    elif symbolic_inputs(model) is None:
        return f"no: {type(model).__name__} does not say what its inputs are"
    else:
        largest = keras_formats.compare(model, folder, options.to)
    return f"with the Keras model, largest difference {largest:.1g}"


def compare_with_transformers(model: keras.Model, folder: Path) -> float:
    """Returns the largest difference between a Keras model and its export to Hugging Face.

    Args:
        model: the exported model.
        folder: the export.

    Raises:
        Differs: the export's outputs differ.
        RunError: `transformers` cannot load or run it.
    """
    try:
        if isinstance(model, keras_nlp.models.CausalLM):
            return huggingface.compare_causal_lm(model, folder)
        return huggingface.compare(model, folder)
    except Differs:
        raise
    except Exception as error:  # whatever transformers raises
        raise RunError(
            f"--to huggingface: transformers cannot load or run the export ({first_line(error)}); "
            "nothing is kept"
        ) from error


def not_installed(names: tuple[str, ...]) -> list[str]:
    """Returns the packages among these that cannot be imported."""
    return [name for name in names if not importlib.util.find_spec(name)]


if __name__ == "__main__":
    command_line(Options, main)
