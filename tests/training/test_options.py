import dataclasses
import json
import os
import shlex
import typing
from pathlib import Path

import pytest

from recipes import (
    bert_mlm,
    classify,
    compare,
    dna_melting,
    evaluate,
    export,
    fill_mask,
    mnist,
    predict,
    text_classification,
)
from training import checks
from training.command_line import parse
from training.errors import OptionsError
from training.options import SharedOptions, all_problems, check, command, from_json, to_json

SHARED = """
dataset strategy replicas precision batch-size-per-replica global-batch-size base-learning-rate
lr-scaling epochs max-steps max-examples validate-every test-every checkpoint-every
keep-checkpoints keep-best early-stopping resume clip-norm accumulate-steps steps-per-execution
jit seed deterministic run-dir options cache-dir log-every quiet
""".split()


def problems(**values):
    return all_problems(bert_mlm.Options(**values))


class TestParse:
    def test_values_take_their_fields_types(self):
        line = (
            "--epochs 3 --base-learning-rate 1e-3 --run-dir there --quiet --strategy mirrored "
            "--replicas 2 --dropout 0.1 --text-mode lines"
        )
        options = parse(bert_mlm.Options, line.split())
        assert (options.epochs, options.base_learning_rate, options.dropout) == (3, 1e-3, 0.1)
        assert (options.run_dir, options.quiet) == (Path("there"), True)
        assert (options.strategy, options.replicas, options.text_mode) == ("mirrored", 2, "lines")

    def test_the_defaults_have_no_problem(self):
        assert parse(bert_mlm.Options, []) == bert_mlm.Options()

    @pytest.mark.parametrize(
        "line", ["--epochs three", "--strategy mirror", "--no-such-option 1", "left over"]
    )
    def test_what_does_not_parse_exits_with_2(self, line, capsys):
        with pytest.raises(SystemExit) as left:
            parse(bert_mlm.Options, line.split())
        assert left.value.code == 2
        assert capsys.readouterr().err

    def test_help_explains_every_field(self, capsys):
        with pytest.raises(SystemExit) as left:
            parse(bert_mlm.Options, ["--help"])
        assert left.value.code == 0
        text = capsys.readouterr().out
        for name in SHARED:
            assert f"--{name}" in text, name
        for field in dataclasses.fields(bert_mlm.Options):
            assert f"--{field.name.replace('_', '-')}" in text
        assert "Fill in masked words" in text and "Word pieces to learn" in text

    def test_the_command_that_resumes_a_run_gives_the_same_options(self):
        options = bert_mlm.Options(
            dataset="a text.txt", epochs=3, quiet=True, run_dir=Path("r"), weight_decay=0.0
        )
        words = shlex.split(command("bert_mlm", options))
        assert words[:3] == ["python", "-m", "recipes.bert_mlm"]
        assert parse(bert_mlm.Options, words[3:]) == options

    def test_each_option_is_in_that_command(self):
        for field in dataclasses.fields(bert_mlm.Options):
            options = bert_mlm.Options()
            value = getattr(options, field.name)
            setattr(options, field.name, not value if isinstance(value, bool) else "other")
            given = f"--{field.name.replace('_', '-')}" in shlex.split(command("it", options))
            assert given == (field.name not in ("options", "resume")), field.name


class TestProblems:
    def test_all_are_reported_together(self):
        with pytest.raises(OptionsError) as caught:
            parse(
                bert_mlm.Options,
                "--epochs 0 --base-learning-rate nan --clip-norm -1 --seed -1 --num-heads 3 "
                "--batch-size-per-replica 4 --global-batch-size 8 --mlm-probability 0 "
                "--sequence-length 3 --early-stopping 2".split(),
            )
        lines = str(caught.value).splitlines()
        assert len(lines) == 9
        for part in (
            "--epochs 0: must be more than 0",
            "--base-learning-rate nan: must be more than 0",
            "--clip-norm -1.0: must be more than 0",
            "--seed -1: must be 0 or more",
            "--hidden-dim 128: must be a multiple of --num-heads 3",
            "--batch-size-per-replica 4 and --global-batch-size 8: give one of them",
            "--mlm-probability 0.0: must lie above 0 and at most at 1",
            "--sequence-length: must lie between 4 and 512",
            "--early-stopping needs --keep-best, for instance val_loss",
        ):
            assert part in lines

    @pytest.mark.parametrize(
        "name",
        [
            *("replicas", "batch_size_per_replica", "global_batch_size", "epochs", "max_steps"),
            *("max_examples", "validate_every", "test_every", "checkpoint_every"),
            *("keep_checkpoints", "accumulate_steps", "steps_per_execution", "log_every"),
            *("early_stopping", "vocabulary_size"),
        ],
    )
    def test_counts_are_above_zero(self, name):
        option = "--" + name.replace("_", "-")
        for value in (0, -1):
            assert f"{option} {value}: must be more than 0" in problems(**{name: value})

    @pytest.mark.parametrize("name", ["num_layers", "num_heads", "hidden_dim"])
    def test_sizes_have_limits(self, name):
        option = "--" + name.replace("_", "-")
        for value in (0, -1):
            assert problems(**{name: value})[0].startswith(f"{option}: must lie between 1 and 1")

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
    @pytest.mark.parametrize(
        "name",
        [
            *("base_learning_rate", "clip_norm", "weight_decay", "beta_1", "beta_2", "dropout"),
            "mlm_probability",
        ],
    )
    def test_numbers_are_finite_and_not_negative(self, name, value):
        assert len(problems(**{name: value})) == 1
        assert problems(**{name: value})[0].startswith(f"--{name.replace('_', '-')} {value}: must ")

    def test_all_of_text_classification_are_reported_together(self):
        found = all_problems(text_classification.Options(epochs=0, token_dropout=2.0, num_layers=0))
        assert [line.split()[0].rstrip(":") for line in found] == [
            "--epochs",
            "--num-layers",
            "--token-dropout",
        ]

    def test_zero_where_it_means_none(self):
        assert not problems(weight_decay=0.0, warmup_steps=0, dropout=0.0, beta_1=0.0)

    def test_a_length_over_the_models_limit(self):
        assert problems(sequence_length=513) == ["--sequence-length: must lie between 4 and 512"]
        assert not problems(sequence_length=512)

    def test_a_run_dir_that_is_a_file(self, tmp_path):
        (tmp_path / "file").touch()
        assert problems(run_dir=tmp_path / "file") == [
            f"--run-dir {tmp_path / 'file'}: is a file, a folder is expected"
        ]

    def test_a_vocabulary_beside_a_preset(self):
        found = problems(preset="bert_tiny_en_uncased", vocabulary=Path("vocab.txt"))
        assert found == ["--vocabulary: the preset bert_tiny_en_uncased has its own"]

    def test_what_does_not_go_with_the_devices(self, monkeypatch):
        monkeypatch.delenv("TF_CONFIG", raising=False)
        options = SharedOptions(
            strategy="mirrored", replicas=3, global_batch_size=8, jit="on", epochs=2
        )
        check(options)
        with pytest.raises(OptionsError) as caught:
            checks.refuse_pairs(options)
        lines = str(caught.value).splitlines()
        assert len(lines) == 2
        assert "--jit on: XLA cannot compile the all-reduce of mirrored" in lines[0]
        assert lines[1].startswith("--global-batch-size 8 cannot be shared by 3 replicas")


class TestOptionsFile:
    def write(self, path, values):
        path.write_text(json.dumps(values))
        return str(path)

    def test_its_values_become_the_defaults(self, tmp_path):
        first = bert_mlm.Options(
            epochs=5, vocabulary=Path("vocab.txt"), run_dir=Path("first"), resume="never"
        )
        content = {"recipe": "bert_mlm", "options": to_json(first), "resolved": {}}
        path = self.write(tmp_path / "options.json", content)
        for arguments in (["--options", path], [f"--options={path}"]):
            options = parse(bert_mlm.Options, [*arguments, "--seed", "3"])
            assert (options.epochs, options.vocabulary, options.seed) == (5, Path("vocab.txt"), 3)
            # Where the run lies and how it resumes are not taken over.
            assert (options.run_dir, options.resume) == (None, "auto")
            assert str(options.options) == path

    def test_unknown_names_are_refused(self, tmp_path):
        path = self.write(tmp_path / "options.json", {"epochs": 1, "epoch": 2, "lr": 0.1})
        with pytest.raises(OptionsError, match="unknown names epoch, lr"):
            parse(bert_mlm.Options, ["--options", path])

    def test_wrong_types_are_reported_together(self, tmp_path):
        values = {"epochs": "many", "strategy": "mirror", "quiet": 1, "base_learning_rate": 1}
        path = self.write(tmp_path / "options.json", values)
        with pytest.raises(OptionsError) as caught:
            parse(bert_mlm.Options, ["--options", path])
        lines = str(caught.value).splitlines()
        assert len(lines) == 3
        assert "epochs is 'many'" in lines[0] and "strategy is 'mirror'" in lines[1]
        assert "quiet is 1" in lines[2]

    def test_its_values_are_checked_like_any_other(self, tmp_path):
        path = self.write(tmp_path / "options.json", {"epochs": 0})
        with pytest.raises(OptionsError, match="--epochs 0: must be more than 0"):
            parse(bert_mlm.Options, ["--options", path])

    @pytest.mark.parametrize("content", [None, "{", "[1]", b"\xff"])
    def test_what_is_no_json_object(self, tmp_path, content):
        path = tmp_path / "options.json"
        if content is not None:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        with pytest.raises(OptionsError, match=f"--options {path}: "):
            parse(bert_mlm.Options, ["--options", str(path)])

    @pytest.mark.parametrize(
        "content", ["null", "[]", "5", '"text"', '{"options": 5}', '{"options": [1]}', "[" * 10**5]
    )
    def test_json_that_is_no_options(self, tmp_path, content):
        path = tmp_path / "options.json"
        path.write_text(content)
        with pytest.raises(OptionsError) as caught:
            parse(mnist.Options, ["--options", str(path)])
        assert str(caught.value).startswith(f"--options {path}: ")
        assert len(str(caught.value).splitlines()) == 1

    @pytest.mark.parametrize("value", [[1], {"a": 1}, "text", None, 1.5, True, 10**400, [0] * 9999])
    def test_values_of_wrong_inner_types(self, tmp_path, value):
        path = self.write(tmp_path / "options.json", {"options": {"epochs": value}})
        with pytest.raises(OptionsError, match="epochs") as caught:
            parse(mnist.Options, ["--options", path])
        assert len(str(caught.value)) < 400

    def test_a_number_that_is_none(self, tmp_path):
        path = tmp_path / "options.json"
        path.write_text('{"clip_norm": NaN, "base_learning_rate": Infinity}')
        with pytest.raises(OptionsError) as caught:
            parse(mnist.Options, ["--options", str(path)])
        assert len(str(caught.value).splitlines()) == 2

    @pytest.mark.parametrize("path", ["~nosuchuser/options.json", "x" * 300, "\udcff", "a\0b"])
    def test_a_path_that_cannot_be(self, path):
        with pytest.raises(OptionsError, match="--options "):
            from_json(mnist.Options, Path(path))

    @pytest.mark.parametrize("path", ["/dev/full", "a-pipe"])
    def test_what_has_no_end(self, tmp_path, path, monkeypatch):
        monkeypatch.setattr(Path, "read_text", lambda *_, **__: pytest.fail("is read"))
        os.mkfifo(tmp_path / "a-pipe")
        with pytest.raises(OptionsError, match="--options .*: a device; expected a file"):
            parse(mnist.Options, ["--options", str(tmp_path / path)])

    def test_a_folder(self, tmp_path):
        with pytest.raises(OptionsError, match=f"--options {tmp_path}: Is a directory"):
            parse(mnist.Options, ["--options", str(tmp_path)])


@pytest.mark.parametrize("recipe", [classify, fill_mask])
def test_a_text_that_is_not_utf8(recipe):
    options = recipe.Options(run_dir=Path("run"), texts=("good [MASK]", "caf\udce9 [MASK]"))
    assert all_problems(options) == ["--texts caf\\udce9 [MASK]: is not UTF-8"]


SEVERAL = {fill_mask: "texts", classify: "texts", predict: "inputs", compare: "run_dirs"}


@pytest.mark.parametrize(
    "program", [*SEVERAL, evaluate, export], ids=lambda each: each.__name__.split(".")[-1]
)
class TestAsANotebookGivesThem:
    """Text for a path, and a list, or one value, for several."""

    def given(self, program, **values):
        if program is not compare:
            values = {"run_dir": "run"} | values
        if program is export:
            values = {"to": "saved_model"} | values
        return program.Options(**values)

    def test_is_taken(self, program):
        name = SEVERAL.get(program)
        for value in (["a [MASK]"], "a [MASK]", ("a [MASK]",)):
            options = self.given(program, **({name: value} if name else {}))
            assert all_problems(options) == []
            if name:
                kind = Path if program is compare else str
                assert getattr(options, name) == (kind("a [MASK]"),)
            if program is not compare:
                assert options.run_dir == Path("run")

    def test_other_types_are_told(self, program):
        """Of each option, also of one that is added tomorrow."""
        for field in dataclasses.fields(program.Options):
            for value in ({}, [{}]):
                (found,) = all_problems(self.given(program, **{field.name: value}))
                option = f"--{field.name.replace('_', '-')} "
                assert found.startswith(option) and "must be" in found


def test_a_picture_that_is_named_by_text():
    assert all_problems(compare.Options(run_dirs="run", png="curves.png")) == []
    assert "must end in" in all_problems(compare.Options(run_dirs="run", png="text"))[0]


def fields_of(kind, wanted):
    """The names of a dataclass's fields that take a type."""
    hints = typing.get_type_hints(kind)
    return [
        field.name
        for field in dataclasses.fields(kind)
        if wanted in (typing.get_args(hints[field.name]) or (hints[field.name],))
    ]


RECIPES = [recipe.Options for recipe in (bert_mlm, text_classification, mnist, dna_melting)]
NEGATIVE_OR_HUGE = [-1, -(10**5000), 2**63, 10**400, 10**5000]


@pytest.mark.parametrize("kind", RECIPES, ids=lambda kind: kind.__module__)
class TestClassesOfWrongValues:
    """Each option of a recipe, also one that is added tomorrow."""

    def test_whole_numbers_of_any_size(self, kind):
        for name in fields_of(kind, int):
            for value in NEGATIVE_OR_HUGE:
                found = all_problems(kind(**{name: value}))
                assert found and f"--{name.replace('_', '-')}" in found[0], (name, value)
                assert len(found[0]) < 200, name

    def test_numbers_of_any_size(self, kind):
        for name in fields_of(kind, float):
            for value in (-1, -1e300, float("nan"), float("inf"), 10**400, -(10**5000)):
                found = all_problems(kind(**{name: value}))
                assert found and f"--{name.replace('_', '-')}" in found[0], (name, value)
                assert len(found[0]) < 200, name

    @pytest.mark.parametrize("path", ["~nosuchuser/x", "x" * 300, "a/" * 3000, "\udcff", "a\0b"])
    def test_paths_that_cannot_be(self, kind, path):
        for name in fields_of(kind, Path):
            found = all_problems(kind(**{name: path}))
            assert found and found[0].startswith(f"--{name.replace('_', '-')} "), name
            assert len(found[0]) < 200
            found[0].encode()  # it can be printed

    def test_an_empty_path_is_none(self, kind):
        for name in fields_of(kind, Path):
            found = all_problems(kind(**{name: ""}))
            assert found == [f"--{name.replace('_', '-')} '': must be a path or nothing"]

    def test_other_types(self, kind):
        for field in dataclasses.fields(kind):
            found = all_problems(kind(**{field.name: [1, 2]}))
            assert len(found) == 1 and found[0].startswith(f"--{field.name.replace('_', '-')} [1,")

    def test_the_command_line_says_so_too(self, kind, capsys):
        for name in fields_of(kind, int):
            option = f"--{name.replace('_', '-')}"
            with pytest.raises(OptionsError, match=option):
                parse(kind, [option, str(10**400)])
        with pytest.raises(SystemExit) as left:  # more digits than Python reads
            parse(kind, ["--seed", "9" * 5000])
        assert left.value.code == 2
        capsys.readouterr()
        for option in ("--run-dir", "--cache-dir", "--options", "--dataset"):
            for words in ([option, ""], [f"{option}="]):
                with pytest.raises(OptionsError, match=f"{option}: is empty"):
                    parse(kind, words)


def test_a_folder_that_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may enter any
    assert problems(cache_dir=tmp_path) == [f"--cache-dir {tmp_path}: cannot be read and written"]
