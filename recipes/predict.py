"""Ask a trained model of images or of DNA oligos.

    python -m recipes.predict runs/mnist/first digit.png photo.jpg
    python -m recipes.predict runs/dna_melting/first ACGTTGCATGCCA GGATCCTTAAGCGC

RUN_DIR is the folder of a finished run. Of `recipes.mnist`: prints the likeliest classes of each
image file with their probabilities. Images are made as those that the model knows: 28x28, light on
dark; what had to be done to one is said. Of `recipes.dna_melting`: prints the temperature at which
each oligo melts, in degrees C. Texts are for `recipes.fill_mask` and `recipes.classify`.
"""

import dataclasses
from pathlib import Path

import keras
import keras_nlp  # noqa: F401 (its layers are found by their names when a model is loaded)
import numpy as np

from data import oligos
from data.image_files import read_image
from data.images import DIGITS
from training.artifacts import load_keras_file
from training.command_line import command_line
from training.errors import RunError
from training.options import COUNT, ProgramOptions, check, option
from training.run_folder import open_finished

OTHERS = {"bert_mlm": "fill_mask", "text_classification": "classify"}


@dataclasses.dataclass(kw_only=True)
class Options(ProgramOptions):
    """Options of `recipes.predict`."""

    run_dir: Path = option(
        help="Folder of a finished run of mnist or dna_melting.", positional=True
    )
    inputs: tuple[str, ...] = option(
        (), "Image files, or oligos of 8 to 60 bases.", positional=True
    )
    top: int = option(3, "Classes that are printed for each image.", within=COUNT)

    def problems(self) -> list[str]:
        """Returns a line for each missing input."""
        found = []
        if not self.inputs:
            found.append("no input: give one or more image files or oligos")
        return found


def main(options: Options) -> list[dict]:
    """Prints what the model predicts and returns it.

    Returns:
        For each input a dict with `input`, and with `classes` (dicts with `class` and
        `probability`, the likeliest first) or `celsius`.
    """
    check(options)
    run, results = open_finished(options.run_dir, *PREDICT, *OTHERS)
    recipe = run["recipe"]
    if recipe in OTHERS:
        raise RunError(
            f"{options.run_dir}: a run of {recipe}; ask it with recipes.{OTHERS[recipe]}"
        )
    return PREDICT[recipe](options, results)


def predict_images(options: Options, results: dict) -> list[dict]:
    """Classes of image files."""
    images = [read_image(Path(path)) for path in options.inputs]
    model = load_keras_file(options.run_dir / "model")
    logits = outputs(model, np.stack([image.pixels for image in images]))
    names = results.get("classes", DIGITS)
    if not isinstance(names, list | tuple) or len(names) != logits.shape[1]:
        raise RunError(f"{options.run_dir / 'results.json'}: damaged, its classes are not {names}")
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    found = []
    for path, image, row in zip(options.inputs, images, shares, strict=True):
        best = np.argsort(-row, kind="stable")[: options.top]
        classes = [{"class": names[i], "probability": float(row[i])} for i in best]
        found.append({"input": path, "classes": classes})
        print(path + "".join(f"  ({what})" for what in image.done))
        for item in classes:
            print(f"  {item['probability']:6.1%}  {item['class']}")
    return found


def predict_oligos(options: Options, results: dict) -> list[dict]:
    """Melting temperatures of oligos."""
    sequences = [oligos.checked(text, repr(text[:80])) for text in options.inputs]
    model = load_keras_file(options.run_dir / "model")
    celsius = outputs(model, oligos.encode(sequences))[:, 0]
    found = []
    for sequence, temperature in zip(sequences, celsius, strict=True):
        found.append({"input": sequence, "celsius": float(temperature)})
        print(f"{temperature:6.1f} °C  {sequence}")
    return found


def outputs(model: keras.Model, inputs: np.ndarray) -> np.ndarray:
    """What a model makes of inputs, float64, without dropout."""
    return keras.ops.convert_to_numpy(model(inputs, training=False)).astype(np.float64)


PREDICT = {"mnist": predict_images, "dna_melting": predict_oligos}


if __name__ == "__main__":
    command_line(Options, main)
