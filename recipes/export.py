"""Export a trained model: TensorFlow SavedModel, ONNX, LiteRT, Hugging Face.

    python -m recipes.export RUN_DIR --to saved_model
    python -m recipes.export RUN_DIR --to huggingface --folder my-bert

RUN_DIR is the folder of a finished run of any recipe. `saved_model` of a BERT takes texts, as
strings; `huggingface` is for BERTs and for causal language models of some families; everything else
takes and gives what the Keras model does. The formats: docs/export.md.
"""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Literal

import keras_nlp

from data import files
from exports import huggingface, keras_formats, texts
from training.command_line import command_line
from training.errors import OptionsError, RunError
from training.loaded_run import load_run
from training.options import ProgramOptions, check, option

# What a format needs that this package does not; all of it is in the extra.
NEEDS = {"onnx": ("onnx", "tf2onnx", "onnxruntime"), "huggingface": ("safetensors",)}


@dataclasses.dataclass(kw_only=True)
class Options(ProgramOptions):
    """Options of `recipes.export`."""

    run_dir: Path = option(help="Folder of a finished run.", positional=True)
    to: Literal["saved_model", "onnx", "litert", "huggingface"] = option(help="The format.")
    folder: Path | None = option(
        None, "A new folder for the export (default: exports/<format> in the run's folder)."
    )

    def problems(self) -> list[str]:
        """Returns what is wrong with the values."""
        missing = [name for name in NEEDS.get(self.to, ()) if not importlib.util.find_spec(name)]
        needs = f"--to {self.to}: needs {', '.join(missing)}; pip install -e '.[export]' has them"
        return [needs] if missing else []


def main(options: Options) -> Path:
    """Exports a run's model.

    Returns:
        The folder of the export.
    """
    check(options)
    run = load_run(options.run_dir)
    folder = options.folder or options.run_dir / "exports" / options.to
    if folder.exists():
        raise OptionsError(f"--folder {folder}: already exists; name a new one")
    model = run.load_model("float32")
    tasks = keras_nlp.models.BertMaskedLM, keras_nlp.models.BertTextClassifier
    is_bert = run.preset is not None and isinstance(model, tasks)
    is_causal = run.preset is not None and isinstance(model, keras_nlp.models.CausalLM)
    if options.to == "huggingface" and not is_bert and not is_causal:
        raise OptionsError(
            f"--to huggingface: the model of {options.run_dir} is neither a BERT nor a CausalLM of "
            "KerasNLP"
        )
    classes = run.metadata.get("classes", ())
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with files.atomic(folder) as temporary:
            if options.to == "huggingface" and is_causal:
                said = huggingface.write_causal_lm(model, temporary)
            elif options.to == "huggingface":
                said = huggingface.write(model, temporary, classes)
            elif options.to == "saved_model" and is_bert:
                said = texts.write(model, temporary, str(run.preset), classes)
            else:
                said = keras_formats.write(model, temporary, options.to)
            files.write_checksums(temporary)
    except OSError as error:
        raise RunError(f"--folder {folder}: {error.strerror or error}") from error
    print(f"{options.to:12} {folder}\n{'':12} {said}")
    return folder


if __name__ == "__main__":
    command_line(Options, main)
