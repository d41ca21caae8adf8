"""Query a trained model of any recipe: texts, image files, sequences, whatever it takes.

    python -m recipes.predict runs/bert_mlm/first "the loss is [MASK] over the batch"
    python -m recipes.predict runs/text_classification/first "a small miracle of a film"
    python -m recipes.predict runs/mnist/first digit.png photo.jpg
    python -m recipes.predict runs/dna_melting/first ACGTTGCATGCCA GGATCCTTAAGCGC --sodium 0.05

RUN_DIR is the folder of a finished run. The answers are those of the recipe's own `predict()`,
whose keyword arguments are options here; they stand after the inputs.
"""

import argparse
import dataclasses
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from training.command_line import command_line
from training.errors import RunError
from training.loaded_run import load_run
from training.options import ProgramOptions, check, flag, option


@dataclasses.dataclass(kw_only=True)
class Options(ProgramOptions):
    """Options of `recipes.predict`.

    Attributes:
        MORE: arguments of the command line that are the recipe's.
    """

    MORE: ClassVar[tuple[str, ...]] = ()

    run_dir: Path = option(help="Folder of a finished run.", positional=True)
    inputs: tuple[str, ...] = option(
        help="Inputs as the recipe takes them; texts in quotation marks.", positional=True
    )
    json: bool = option(False, "Print the answers as one JSON array.")


def main(options: Options) -> list[list[dict]]:
    """Prints what the model answers to each input and returns it.

    Returns:
        For each input a list of answers; an answer is a dict of texts and numbers by name.
    """
    check(options)
    run = load_run(options.run_dir)
    if not hasattr(run.module, "predict"):
        raise RunError(f"{options.run_dir}: its recipe, {run.module.__name__}, has no predict()")
    settings = read_settings(run.module.predict, options.MORE)
    answers = run.module.predict(run, [str(given) for given in options.inputs], **settings)
    if options.json:
        print(json.dumps(answers, ensure_ascii=False))
        return answers
    for given, found in zip(options.inputs, answers, strict=True):
        print(given)
        for answer in found:
            print("  " + "  ".join(format_value(name, value) for name, value in answer.items()))
    return answers


def read_settings(predict: Callable, arguments: Sequence[str]) -> dict:
    """Returns the keyword arguments of a recipe's `predict()` that a command line gives."""
    parser = argparse.ArgumentParser("python -m recipes.predict", add_help=False)
    for name, parameter in inspect.signature(predict).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            default = parameter.default
            parser.add_argument(flag(name), type=type(default), default=default, dest=name)
    return vars(parser.parse_args(arguments))


def format_value(name: str, value) -> str:
    """Returns a value of an answer as text: probabilities in percent, word pieces in quotes."""
    if name == "probability":
        return f"{value:6.1%}"
    if name == "piece":
        return f'"{value}"'
    return f"{value:.1f} {name}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    command_line(Options, main)
