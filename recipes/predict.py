"""Query a trained model of any recipe: with texts, image files or sequences.

    python -m recipes.predict runs/bert_mlm/first "the loss is [MASK] over the batch"
    python -m recipes.predict runs/text_classification/first "a small miracle of a film"
    python -m recipes.predict runs/causal_lm/first "The station was built in" --num-samples 3
    python -m recipes.predict runs/mnist/first digit.png photo.jpg
    python -m recipes.predict runs/dna_melting/first ACGTTGCATGCCA GGATCCTTAAGCGC --sodium 0.05
    python -m recipes.predict runs/text_classification/first --file texts.txt --json > found.json
    python -m recipes.predict runs/text_classification/first --file new.csv --text-column review
    python -m recipes.predict RUN_DIR --file new.csv --text-column review --csv answered.csv

RUN_DIR is the folder of a finished run. Calls the recipe's `predict()`, whose keyword
arguments are options of this program: `python -m recipes.predict RUN_DIR --help` lists them.
"""

import argparse
import contextlib
import dataclasses
import inspect
import json
import re
import sys
import traceback
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data import files, glue, live_line, tables
from data.errors import DataError, InputError, is_out_of_memory
from data.inputs import read_columns, read_inputs
from distribution.errors import DistributionError
from training.answer_table import MOST_CLASS_COLUMNS, AnswerTable, problems_of_csv
from training.command_line import TakesMore, command_line, value_arguments
from training.errors import OptionsError, RunError
from training.options import RunOptions, check, flag, option

AT_ONCE = 256  # inputs


@dataclasses.dataclass(kw_only=True)
class Options(TakesMore, RunOptions):
    """Options of `recipes.predict`."""

    inputs: tuple[str, ...] = option(
        (), "Inputs of the recipe's predict(); quote texts.", positional=True
    )
    file: Path | None = option(
        None,
        "Read inputs from this file: one per line, or a column of a CSV, TSV, JSONL or Parquet; "
        "- for standard input. dna_melting, and a recipe with a read_table(), read whole rows.",
    )
    text_column: str | None = option(
        None,
        "Column of the inputs in --file. Of a run on prompts the column of the prompts: an input "
        "or a context, and a system message for a chat, are read with it as in training.",
    )
    second_text_column: str | None = option(
        None, "Column of the second sentences in --file, for pairs."
    )
    json: bool = option(False, "Print the answers as one JSON array.")
    csv: Path | None = option(
        None,
        "Write the rows of --file, or the inputs, with columns for the answers into this file "
        "(.csv), instead of printing them; continues one that the same command began.",
    )

    def problems(self) -> list[str]:
        """Returns a line per problem of the inputs and of the output."""
        problems = self._problems_of_inputs()
        problems += problems_of_csv(self.csv, "--csv", may_exist=True)
        if self.json and self.csv is not None:
            problems.append("--json and --csv: pass only one of them")
        return problems

    def _problems_of_inputs(self) -> list[str]:
        """Returns a line if there are no inputs, two kinds of them, or a column of no table."""
        if self.inputs and self.file is not None:
            return ["INPUTS and --file: pass only one of them"]
        # Without a run, whose options are not known, its folder is what is wrong.
        if not self.inputs and self.file is None and not self.unknown:
            # Of `--stop "Q:" "an input"` the option has both.
            took = any(isinstance(value, list) and value for value in self.more.values())
            order = "; they come before options that take several values" if took else ""
            return [f"INPUTS: pass some, or --file{order}"]
        if self.text_column is None:
            second = self.second_text_column is not None
            return ["--second-text-column: needs --text-column"] if second else []
        if self.file is None or str(self.file) == "-":
            return ["--text-column: needs --file with the name of a table"]
        return []

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser, arguments: list[str]) -> bool:
        """Adds the keyword arguments of the recipe's `predict()`, where a run is named."""
        first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        first.add_argument("run_dir", nargs="?", type=files.expand)
        # The options that take a value.
        takers = ("--trust-module", "--file", "--text-column", "--second-text-column", "--csv")
        for name in takers:
            first.add_argument(name)
        named, _ = first.parse_known_args(arguments)
        # The values of the recipe's own options may come before it.
        words = [files.expand(word) for word in arguments if not word.startswith("-")]
        found = [path for path in (named.run_dir, *words) if path and _is_finished(path)]
        if not found:
            return False
        predict = _load(found[0], trust_module=named.trust_module).module.predict
        hints = typing.get_type_hints(predict)
        group = parser.add_argument_group(f"options of {predict.__module__}")
        for name, parameter in inspect.signature(predict).parameters.items():
            if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                continue
            about = re.search(rf"^ +{name}: (.*)", predict.__doc__ or "", re.MULTILINE)
            is_required = parameter.default is inspect.Parameter.empty
            values = value_arguments(hints.get(name, type(parameter.default)))
            if "nargs" in values:  # without one the option would do nothing
                values["nargs"] = "+"
            try:
                group.add_argument(
                    flag(name),
                    default=None if is_required else parameter.default,
                    required=is_required,
                    help=about[1].replace("%", "%%") if about else "An option of the recipe.",
                    **values,
                )
            except argparse.ArgumentError as error:
                raise RunError(
                    f"{predict.__module__}.predict(): the argument {name} needs another name: "
                    f"recipes.predict has {flag(name)} itself"
                ) from error
        return True


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # a long text, or one with a NUL, is no path
        return False


def _is_finished(folder: Path) -> bool:
    try:
        return (folder / "results.json").exists()
    except (OSError, ValueError):  # a long text, or one with a NUL, is no path
        return False


@live_line.log_on_stderr()
def main(options: Options, **more) -> list[list[dict]]:
    """Prints the model's answers to each input and returns them.

    Args:
        options: the options.
        **more: extra arguments, passed to the recipe's `predict()`.

    Returns:
        One list of answers per input, empty for an empty line or field of a file, and where an
        earlier command wrote them into `--csv`; an answer is a dict of texts and numbers by name.

    Raises:
        DataError: an input cannot be answered; those of a file are all printed first, with an
            "error" for its answer.
    """
    check(options)
    run = _load(options.run_dir, best=options.best, trust_module=options.trust_module)
    inputs: Sequence[Any] = options.inputs
    for index, text in enumerate(options.inputs):
        # Another byte of a command line is half of a surrogate pair; a path may have one.
        if text != text.encode(errors="ignore").decode() and not _exists(text):
            raise InputError(f"{text[:60]!a}: is not UTF-8", index)
    has_rows = options.text_column is not None  # those of a table
    read_table = getattr(run.module, "read_table", None)
    if getattr(read_table, "__module__", None) != run.module.__name__:  # imported for other uses
        read_table = None
    if options.second_text_column is not None and not run.metadata.get("pairs"):
        raise OptionsError("--second-text-column: the run did not learn pairs of sentences")
    if options.file is not None and options.text_column is not None:
        inputs = _read_column(run, options.file, options.text_column, options.second_text_column)
        if read_table is not None:
            print(
                f"--text-column {options.text_column}: that column alone is read; without the "
                f"option {run.module.__name__} reads whole rows",
                file=sys.stderr,
            )
    elif read_table is not None and options.file is not None and _is_table(options.file):
        has_rows = True
        inputs = list(read_table(files.expand(options.file), **(options.more | more)))
    elif options.file is not None:
        inputs = read_inputs(options.file)
    asked = [text for text in inputs if text and not isinstance(text, InputError)]
    # Of all inputs: in some texts it is a part of the text.
    typed = options.text_column is None
    if typed and run.metadata.get("pairs") is False and all(glue.PAIR in text for text in asked):
        raise DataError(f'"{glue.PAIR}" separates two sentences, and the run learned single ones')
    several = bool(run.metadata.get("several"))
    chosen = options.more | more
    if options.more.get("stop") and "stop" not in more:
        chosen["stop"] = [_with_line_breaks(text) for text in options.more["stop"]]
    # All labels that a text has, unless some of them were asked for.
    names_labels = several and not chosen.get("top")
    # Of thousands of classes a file has those alone that an input has, unless all were asked for.
    is_few = len(run.metadata.get("classes", ())) <= MOST_CLASS_COLUMNS
    kinds = {
        "several": names_labels,
        "threshold": chosen.get("threshold", 0.5),
        "class_columns": is_few or chosen.get("top") == 0,
    }
    table, begun = _answer_table(options, inputs, has_rows, kinds), 0
    answers: list[list[dict]] = []
    refused: list[str] = []
    if table is not None and table.begun:
        begun = table.next
        answers = [[] for _ in range(begun)]
        refused = [f"input {index + 1}: {error}" for index, error in table.errors()]
        print(f"{options.csv} has {table.begun:,} of {len(inputs):,} rows, the others follow")
    asked = [text for text in inputs[begun:] if text and not isinstance(text, InputError)]
    if several and is_few and chosen.get("top") is None and (options.json or options.csv):
        chosen["top"] = 0  # probabilities of all labels, not only of those that a text has
    found = _in_parts(run, asked, chosen)
    with table or contextlib.nullcontext():
        for number, text in enumerate(inputs[begun:], start=begun + 1):
            # An empty line or field has no answer, and keeps its place.
            answer = text if isinstance(text, InputError) else next(found) if text else []
            if isinstance(answer, InputError):
                if options.file is None:
                    raise answer
                refused.append(f"input {number}: {answer}")
                answer = [{"error": str(answer)}]
            answers.append(answer)
            if table is not None:
                table.add(answer)
            elif not options.json:
                shown = f"input {number}" if isinstance(text, InputError) else _as_text(text)
                _print(shown, answer, "no label" if several and text else None)
    next(found, None)  # removes the live line
    if options.csv is not None:
        print(f"wrote {options.csv}, {len(answers):,} rows")
    if options.json:
        # Elsewhere than in UTF-8 a character that is missing would be printed as no JSON.
        is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
        print(json.dumps(answers, ensure_ascii=not is_utf8, default=files.json_value))
    if refused:
        more_of_them = f"; likewise {len(refused) - 1:,} more" if len(refused) > 1 else ""
        raise DataError(f"--file {options.file}, {refused[0]}{more_of_them}")
    return answers


def _with_line_breaks(stop: str) -> str:
    r"""Returns a typed stop string with the line breaks and tabs that `\n` and `\t` stand for."""
    meanings = {r"\n": "\n", r"\t": "\t", "\\\\": "\\"}
    read = re.sub(r"\\[nt\\]", lambda found: meanings[found[0]], stop)
    if read.count("\n") > stop.count("\n") or read.count("\t") > stop.count("\t"):
        print(
            rf"--stop '{stop}': \n is read as a line break, \t as a tab; \\n is a backslash and n",
            file=sys.stderr,
        )
    return read


def _read_column(run, path: Path, column: str, second: str | None) -> Sequence[Any]:
    """Returns a table's fields of a column, or pairs of two; of prompts all that training reads."""
    template = run.metadata.get("template", "")  # of causal_lm; None of a run on text
    if template is not None and hasattr(run.options, "prompt_column"):
        from data import prompts  # it imports TensorFlow, which --help does not need

        columns = prompts.Columns.of(run.options.prompt_column, run.options.response_column)
        if column in columns.prompt:
            return prompts.read_prompts(path, column, template or None, columns)
    return read_columns(path, column, second, takes_chats=bool(template))


def _answer_table(
    options: Options, inputs: Sequence[Any], has_rows: bool, kinds: dict[str, Any]
) -> AnswerTable | None:
    """Returns the table of `--csv`: the rows of a table with its inputs, or one column of inputs.

    Args:
        options: name the CSV, and the table.
        inputs: those to answer.
        has_rows: whether they are the rows of a table.
        kinds: of the answers, see `AnswerTable`.

    Raises:
        DataError: the inputs that a recipe's `read_table()` returned are not one per row.
    """
    if options.csv is None:
        return None
    header, rows = ["input"], [[_as_text(text)] for text in inputs]
    if has_rows:
        assert options.file is not None
        header, rows = tables.read_rows(options.file)
        if len(rows) != len(inputs):
            raise DataError(
                f"--csv: read_table() of the recipe returned {len(inputs):,} inputs, expected one "
                f'for each of the {len(rows):,} rows of {options.file}, "" for none'
            )
    return AnswerTable(options.csv, header, rows, AT_ONCE, **kinds)


def _as_text(text) -> str:
    return glue.PAIR.join(text) if isinstance(text, tuple) else str(text)


def _print(text: str, answers: list[dict], none: str | None) -> None:
    """Prints an input and, indented, its answers, or `none` without any."""
    lines = [text] if answers or none is None else [text, f"  {none}"]
    for answer in answers:
        values = (format_value(name, value) for name, value in answer.items())
        lines.append("  " + "  ".join(values))
    with live_line.paused():
        print("\n".join(lines), flush=True)  # a process that is killed loses no more


def _is_table(path: Path) -> bool:
    return tables.is_table(path.name) or tables.has_objects(path.name)


def _in_parts(run, asked: Sequence[Any], more: dict) -> Iterator[list[dict] | InputError]:
    """Yields the answers to each input, or its error; asks for `AT_ONCE` answers at a time."""
    # Several continuations of an input are drawn in one batch.
    at_once = max(1, AT_ONCE // max(1, more.get("num_samples") or 1))
    with live_line.live_line(what="predicting", total=len(asked)) as bar:
        for start in range(0, len(asked), at_once):
            part = asked[start : start + at_once]
            yield from _answers_or_errors(run, part, more)
            bar.update(len(part))


def _answers_or_errors(run, part: Sequence[Any], more: dict) -> list[list[dict] | InputError]:
    """Returns the answers to each input, or its error, so that one loses no others."""
    found: list[Any] = list(part)
    left = list(range(len(part)))  # indices
    while left:
        try:
            answers = _answers(run, [part[index] for index in left], more)
        except InputError as error:
            found[left.pop(error.index)] = error
            continue
        for index, answer in zip(left, answers, strict=True):
            found[index] = answer
        break
    return found


def _answers(run, inputs: Sequence[Any], more: dict) -> list[list[dict]]:
    """Calls the recipe's `predict()` and checks what it returns.

    Raises:
        RunError: it raised an unexpected error, or did not return one list of answers per input.
    """
    name = f"{run.module.__name__}.predict()"
    try:
        answers = run.module.predict(run, list(inputs), **more)
    except (DataError, DistributionError, OptionsError, RunError, OSError):
        raise  # they are explained in a line
    except Exception as error:
        if is_out_of_memory(error):
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise RunError(
            f"{name} raised {type(error).__name__}: {' '.join(str(error).split())[:300]} "
            f"({Path(place.filename).name}, line {place.lineno})"
        ) from error
    rows = answers if isinstance(answers, list) else []
    if len(rows) != len(inputs) or not all(
        isinstance(row, list) and all(isinstance(answer, dict) for answer in row) for row in rows
    ):
        raise RunError(
            f"{name} must return one list of dicts per input, {len(inputs)} in all; "
            f"found {' '.join(repr(answers).split())[:100]}"
        )
    return rows


def _load(folder: Path, **options):
    from training.loaded_run import load_run  # it imports TensorFlow, which --help does not need

    run = load_run(folder, **options)
    if not hasattr(run.module, "predict"):
        raise RunError(f"{folder}: its recipe, {run.module.__name__}, has no predict()")
    return run


def format_value(name: str, value) -> str:
    """Formats a value of an answer: probabilities in percent, word pieces in quotes."""
    if name == "probability":
        return f"{value:6.1%}"
    if name == "plus_minus":
        return f"± {value:.1f}"
    if name == "piece":
        return f'"{value}"'
    if name == "tokens":
        return f"{value:,} tokens"
    if not isinstance(value, float):
        return str(value)
    if name == "°C":
        return f"{value:.1f} °C"
    digits = f"{value:.4g}" if abs(value) < 10_000 else f"{value:.0f}"
    return digits if name == "score" else f"{digits} {name}"


if __name__ == "__main__":
    command_line(Options, main)
