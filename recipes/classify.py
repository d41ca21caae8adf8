"""Sort texts into the classes of a trained classifier.

    python -m recipes.classify RUN_DIR "a film that never finds its feet" "a small miracle"

RUN_DIR is the folder of a finished run of `recipes.text_classification`. Prints, for each text, the
likeliest classes with their probabilities.
"""

import dataclasses
from pathlib import Path

import keras_nlp
import numpy as np

from data import sentence_inputs
from models import bert
from training.command_line import command_line
from training.errors import RunError
from training.options import COUNT, ProgramOptions, check, option
from training.run_folder import open_finished, require_keys


@dataclasses.dataclass(kw_only=True)
class Options(ProgramOptions):
    """Options of `recipes.classify`."""

    run_dir: Path = option(help="Folder of a finished run of text_classification.", positional=True)
    texts: tuple[str, ...] = option((), "Texts to sort.", positional=True)
    top: int = option(3, "Classes that are printed for each text.", within=COUNT)

    def problems(self) -> list[str]:
        """Returns a line for each missing input."""
        found = []
        if not self.texts:
            found.append("no text: give one or more, each in quotation marks")
        return found + ["an empty text" for text in self.texts if not text.strip()]


def main(options: Options) -> list[dict]:
    """Prints the classes and returns them.

    Returns:
        For each text a dict with `text` and `classes`: dicts with `class` and `probability`, the
        likeliest first.
    """
    check(options)
    _, results = open_finished(options.run_dir, "text_classification")
    results_file, preset = options.run_dir / "results.json", options.run_dir / "model"
    require_keys(results_file, results, classes=list)
    if not (preset / "preprocessor.json").is_file():  # KerasHub would take another length
        raise RunError(f"{preset}: damaged, it lacks preprocessor.json")
    kind = keras_nlp.models.BertTextClassifier
    model = bert.load(kind, str(preset), dtype="float32", compile=False)
    if model.num_classes != len(results["classes"]):
        raise RunError(
            f"{results_file}: damaged, it has {len(results['classes'])} classes and the model "
            f"{model.num_classes}"
        )
    inputs = sentence_inputs.encode(options.texts, model.preprocessor)
    logits = np.asarray(model(inputs, training=False), np.float64)
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    found = []
    for text, row in zip(options.texts, shares, strict=True):
        best = np.argsort(-row, kind="stable")[: options.top]
        classes = [{"class": results["classes"][i], "probability": float(row[i])} for i in best]
        found.append({"text": text, "classes": classes})
        print(text)
        for item in classes:
            print(f"  {item['probability']:6.1%}  {item['class']}")
    return found


if __name__ == "__main__":
    command_line(Options, main)
