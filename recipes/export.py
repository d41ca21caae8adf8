"""Take a trained model elsewhere: TensorFlow, Hugging Face, ONNX, LiteRT.

    python -m recipes.export RUN_DIR --to saved_model
    python -m recipes.export RUN_DIR --to huggingface --folder my-bert

RUN_DIR is the folder of a finished run. What is written is read again and compared with the Keras
model on real inputs, of the run's own test data where they are at hand; if it differs, nothing is
left. Beside the model lie a card (README.md) with the differences that were measured and a snippet
that loads it, and checksums. The formats and what they hold: docs/export.md.
"""

import dataclasses
import importlib
from pathlib import Path
from typing import Literal

from data import files
from exports import trained
from training.command_line import command_line
from training.errors import OptionsError, RunError
from training.loaded_run import load_run
from training.model_card import LOADING
from training.options import (
    ProgramOptions,
    check,
    is_installed,
    option,
    to_json,
    unusable_folder,
)

# What a format needs that this package does not; all of it is in the extra.
NEEDS = {
    "saved_model": (),
    "huggingface": ("safetensors",),
    "onnx": ("onnx", "tf2onnx", "onnxruntime"),
    "litert": (),
}


@dataclasses.dataclass(kw_only=True)
class Options(ProgramOptions):
    """Options of `recipes.export`."""

    run_dir: Path = option(help="Folder of a finished run.", positional=True)
    to: Literal["saved_model", "huggingface", "onnx", "litert"] = option(help="The format.")
    folder: Path | None = option(
        None, "A new folder for it (default: exports/<format> in the run's folder)."
    )

    def problems(self) -> list[str]:
        """What is wrong with the values."""
        found = unusable_folder("folder", self.folder)
        missing = [name for name in NEEDS.get(self.to, ()) if not is_installed(name)]
        if missing:
            found.append(
                f"--to {self.to}: needs {', '.join(missing)}; pip install -e '.[export]' has them"
            )
        return found


def main(options: Options) -> dict:
    """Exports a run's model.

    Returns:
        A dict with `folder`, and `differences` from the Keras model, by what was compared.
    """
    check(options)
    run_dir = options.run_dir
    run = load_run(run_dir)
    folder = (options.folder or run_dir / "exports" / options.to).expanduser()
    if folder.exists():
        raise OptionsError(f"--folder {folder}: is there already; name a new one")
    saved = {"recipe": run.recipe, "options": to_json(run.options), "resolved": run.resolved}
    model = trained.load(run_dir, saved, run.results | run.metadata)
    if options.to == "huggingface" and not model.is_bert:
        raise OptionsError(
            f"--to huggingface: {run_dir} is a run of {model.recipe}, which is no BERT"
        )
    writer = importlib.import_module(f"exports.{options.to}")

    # Written aside: where it differs, or the disk is full, nothing is left.
    made = [path for path in folder.parents if not path.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with files.atomic(folder) as temporary:
            differences = writer.write(model, temporary)
            text = card(run_dir, model, differences, writer.how_to_load(model))
            (temporary / "README.md").write_text(text, encoding="utf-8")
            files.write_checksums(temporary)
    except BaseException as error:
        for path in made:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        if isinstance(error, OSError):
            raise RunError(f"--folder {folder}: {error.strerror or error}") from error
        raise
    print(f"{options.to:12} {folder}")
    for name, value in differences.items():
        print(f"  {value:.3g}  {name}, on {len(model.outputs)} {model.sources_of}")
    return {"folder": str(folder), "differences": differences}


def card(run_dir: Path, model, differences: dict[str, float], how_to_load: str) -> str:
    """The run's own card, with what was compared and how to load this in the place of its snippet.

    Args:
        run_dir: the run's folder; a run of an earlier version has no card.
        model: what was exported, an `exports.trained.Trained`.
        differences: by what was compared.
        how_to_load: Python that runs in the export's folder.
    """
    path = run_dir / "model" / "README.md"
    text = path.read_text(encoding="utf-8") if path.exists() else f"# A model of {model.recipe}\n"
    rows = [f"| {name} | {value:.3g} |" for name, value in differences.items()]
    parts = [
        text.split(f"\n{LOADING}")[0].rstrip(),
        f"## Compared with the Keras model\n\nOn {len(model.outputs)} {model.sources_of}.",
        "\n".join(["| largest difference | |", "|---|---|", *rows]),
        f"{LOADING}\n\nIn this folder:\n\n```python\n{how_to_load}\n```",
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    command_line(Options, main)
