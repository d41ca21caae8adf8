import dataclasses
import inspect
import json
import math
import re
import shlex
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from recipes import (
    bert_mlm,
    causal_lm,
    compare,
    dna_melting,
    mnist,
    predict,
    seq2seq,
    text_classification,
)
from tests.support import tiny_recipe
from training.command_line import NAMES_ELSEWHERE, alias_notes, make_parser, parse
from training.errors import OptionsError, RunError
from training.options import (
    HIDDEN,
    SharedOptions,
    all_problems,
    check,
    command,
    flag,
    from_json,
    interpreter,
    metadata,
    module_name,
    option,
    predict_command,
    profile_window,
    shown,
    to_json,
)

RECIPES = [recipe.Options for recipe in (bert_mlm, text_classification, mnist, dna_melting)]


def problems(**values):
    return all_problems(bert_mlm.Options(**values))


def parsed(kind, line):
    return parse(kind, "prog", arguments=shlex.split(line))


@dataclasses.dataclass(kw_only=True)
class Wings(SharedOptions):
    epochs: int = 7
    seed: int = option(3, "Another seed.")
    wings: int = option(
        2, "Number of wings.", group="flight", within="[1, 4)", overridden_by=("preset",)
    )
    feathers: float = 0.5
    preset: str = "auto"


class TestMetadata:
    def test_another_default_or_help_keeps_the_rest(self):
        assert metadata(Wings, "epochs") == metadata(SharedOptions, "epochs")
        seed = metadata(Wings, "seed")
        assert seed["help"] == "Another seed."
        assert (seed["group"], seed["within"]) == ("training", "[0, 2147483647]")

    def test_a_name_that_is_not_known(self):
        with pytest.raises(TypeError, match="option.. takes help, group, within"):
            option(1, "Number.", wihtin="[1, 2]")

    def test_a_plain_field_is_an_option(self):
        feathers = metadata(Wings, "feathers")
        assert (feathers["resume"], feathers["shown"], feathers["within"]) == ("fixed", True, None)

    def test_options_that_describe_the_training(self):
        found = shown(Wings(wings=3, run_dir="x", cache_dir="y"))
        assert found["wings"] == 3 and found["epochs"] == 7
        assert not {"run_dir", "cache_dir", "quiet", "resume"} & set(found)
        # What another option overrules says nothing; `auto` is what it became.
        found = shown(Wings(wings=3), {"preset": "bert_tiny", "total_steps": 8})
        assert found["preset"] == "bert_tiny"
        assert "wings" not in found and "total_steps" not in found
        assert "vocabulary_size" not in shown(bert_mlm.Options(vocabulary="words.txt"))
        assert "vocabulary_size" in shown(bert_mlm.Options(), {"preset": "scratch"})


class TestParse:
    def test_values_take_their_fields_types(self):
        options = parsed(
            bert_mlm.Options,
            "--epochs 3 --base-learning-rate 1e-3 --run-dir there --quiet --strategy mirrored "
            "--replicas 2 --dropout 0.1 --text-mode lines --no-deterministic",
        )
        assert options == bert_mlm.Options(
            epochs=3,
            base_learning_rate=1e-3,
            run_dir=Path("there"),
            quiet=True,
            strategy="mirrored",
            replicas=2,
            dropout=0.1,
            text_mode="lines",
        )
        assert parsed(bert_mlm.Options, "") == bert_mlm.Options()

    def test_positional_values(self):
        assert parsed(compare.Options, "a b").run_dirs == (Path("a"), Path("b"))
        assert parsed(predict.Options, "run x.png --json").inputs == ("x.png",)

    def test_options_of_the_recipe_may_follow_a_file(self, tmp_path, monkeypatch):
        (tmp_path / "results.json").touch()
        module = types.SimpleNamespace(predict=causal_lm.predict)
        loaded = types.SimpleNamespace(module=module)
        monkeypatch.setattr(predict, "_load", lambda folder, **options: loaded)
        line = f"--file texts.txt {tmp_path} --temperature 0"
        found = parsed(predict.Options, line)
        assert found.more["temperature"] == 0 and found.file == Path("texts.txt")
        with pytest.raises(SystemExit):
            parsed(predict.Options, f"--file texts.txt {tmp_path} --temprature 0")

    @pytest.mark.parametrize(
        "kind, line",
        [
            (mnist.Options, "--epochs three"),
            (mnist.Options, "--strategy mirror"),
            (mnist.Options, "--epoch 3"),
            (mnist.Options, "left over"),
            (mnist.Options, "--seed " + "9" * 5000),
            (predict.Options, ""),
        ],
    )
    def test_what_does_not_parse_exits_with_2(self, kind, line, capsys):
        with pytest.raises(SystemExit) as left:
            parsed(kind, line)
        assert left.value.code == 2
        assert "error: " in capsys.readouterr().err

    def test_an_unknown_option_names_the_nearest_one(self, capsys):
        for line, said in (
            ("--epoch 3 --sed=4", "--epoch 3 --sed=4; did you mean --epochs, --seed?\n"),
            ("--num_train_epochs 3 --lr 1", "; did you mean --epochs, --base-learning-rate?\n"),
            ("--train-file a", "; did you mean --dataset?\n"),
            (
                "--do_train --report_to none",
                ": --do_train --report_to none\n",
            ),
            ("--zzz --max-seq-length 9", "unrecognized arguments: --zzz --max-seq-length 9\n"),
        ):
            with pytest.raises(SystemExit):
                parsed(mnist.Options, line)
            assert capsys.readouterr().err.endswith(said)

    def test_a_glob_that_the_shell_has_expanded(self, capsys, tmp_path):
        names = [tmp_path / f"{name}.txt" for name in "abc"]
        for name in names:
            name.touch()
        with pytest.raises(SystemExit):
            parsed(mnist.Options, f"--dataset {names[0]} {names[1]} {names[2]}")
        assert "; quote a glob, so that the shell" in capsys.readouterr().err

    def test_names_elsewhere_stand_for_options_of_the_recipes(self, capsys):
        recipes = (bert_mlm, causal_lm, mnist, seq2seq, text_classification, predict)
        kinds = [recipe.Options for recipe in recipes]
        pages = " ".join(make_parser(kind, "prog", "").format_help() for kind in kinds)
        known = set(re.findall(r"(?<!\S)--[a-z][\w-]*", pages))
        known |= {flag(name) for name in inspect.signature(causal_lm.predict).parameters}
        assert {text.partition(" ")[0] for text in NAMES_ELSEWHERE.values() if text} <= known
        # Of one recipe, and of those that others do not have.
        assert set(NAMES_ELSEWHERE) & known == {
            *("--init-from", "--label-smoothing", "--lora-alpha", "--num-beams", "--text-column"),
            *("--max-length", "--stop"),  # of recipes.predict
        }
        with pytest.raises(SystemExit):
            parsed(causal_lm.Options, "--init-from runs/causal_lm/first")
        assert "did you mean --preset?" in capsys.readouterr().err
        for name in ("--max-eval-samples", "--max_eval_samples"):
            with pytest.raises(SystemExit):
                parsed(mnist.Options, f"{name} 100")
            assert "did you mean --max-validation-examples?" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("kind", "line", "hint"),
        [
            (bert_mlm, "--line_by_line", "; did you mean --text-mode lines?"),
            (bert_mlm, "--tokenizer_name a", "; did you mean --vocabulary?"),
            (bert_mlm, "--validation_split_percentage 5", ""),
            (bert_mlm, "--validation-split 0.1", ""),
            (bert_mlm, "--num_beams 4", ""),
            (bert_mlm, "--text_column a", "; did you mean --text-column?"),
            (mnist, "--label-smoothing 0.1", ""),
            (mnist, "--eval_accumulation_steps 4", ""),
            (mnist, "--per_device_eval_batch_size 4", ""),
            (mnist, "--max_predict_samples 4", ""),
            (mnist, "--fsdp a", ""),  # but for its hyphens it is not much like --seed
            (causal_lm, "--packing", ""),
            (causal_lm, "--adam_beta2 0.95", "; did you mean --beta-2?"),
            (causal_lm, "--lr_scheduler_type cosine", "; did you mean --lr-schedule?"),
            (mnist, "--lr_scheduler_type cosine", ""),
            (causal_lm, "--beta 0.1", ""),
            (mnist, "--lora-alpha 16", ""),
            (causal_lm, "--lora_alpha 16", "; did you mean --lora-alpha?"),
            (causal_lm, "--lora_dropout 0.1", ""),
            (causal_lm, "--assistant-only-loss", ""),
            (causal_lm, "--lora_r 8", "; did you mean --lora-rank?"),
            (seq2seq, "--num_beams 4", "; did you mean --num-beams?"),
            (seq2seq, "--num_return_sequences 4", ""),  # of recipes.predict
            (seq2seq, "--max_target_length 9", "; did you mean --response-length?"),
            (seq2seq, "--text_column a", "; did you mean --prompt-column?"),
            (seq2seq, "--summary_column a", "; did you mean --response-column?"),
            (seq2seq, "--pad_to_max_length", "; did you mean --group-by-length off?"),
            (seq2seq, "--label_smoothing_factor 0.1", "; did you mean --label-smoothing?"),
        ],
    )
    def test_a_hint_names_what_does_the_same_or_nothing(self, kind, line, hint, capsys):
        with pytest.raises(SystemExit):
            parsed(kind.Options, line)
        assert capsys.readouterr().err.endswith(f"unrecognized arguments: {line}{hint}\n")

    def test_an_alias_says_which_option_it_is(self):
        line = "--learning-rate 0.1 --batch-size=16"
        options = parsed(mnist.Options, line)
        assert (options.base_learning_rate, options.batch_size_per_replica) == (0.1, 16)
        assert alias_notes(mnist.Options, line.split()) == [
            "--batch-size is --batch-size-per-replica: examples per batch on one replica",
            "--learning-rate is --base-learning-rate: peak learning rate for one replica",
        ]
        assert alias_notes(mnist.Options, ["--base-learning-rate", "0.1"]) == []
        # Not where a recipe has an option of that name.
        kind = dataclasses.make_dataclass(
            "Own", [("learning_rate", float, option(0.5, "Mine."))], bases=(SharedOptions,)
        )
        assert parsed(kind, "--learning-rate 2").learning_rate == 2
        assert alias_notes(kind, ["--learning-rate", "2"]) == []

    @pytest.mark.parametrize("kind", RECIPES, ids=lambda kind: kind.__module__)
    def test_help_explains_every_field(self, kind, capsys):
        with pytest.raises(SystemExit) as left:
            parse(kind, "prog", "What it learns: 95 %.", ["--help"])
        assert left.value.code == 0
        text = capsys.readouterr().out
        assert "What it learns: 95 %." in text and max(map(len, text.splitlines())) <= 100
        for field in dataclasses.fields(kind):
            about = metadata(kind, field.name)
            if about["help"] == HIDDEN:
                continue
            assert f"--{field.name.replace('_', '-')}" in text
            assert about["help"].split()[0] in text and f"\n{about['group']}:\n" in text
        assert " ".join(text.split()).count("Passes over the training split") == 1
        assert "usually 32" in text

    def test_the_command_that_resumes_a_run_gives_the_same_options(self):
        options = bert_mlm.Options(
            dataset="a text.txt", epochs=3, quiet=True, run_dir=Path("r"), weight_decay=0.0
        )
        words = shlex.split(command("bert_mlm", options))
        assert words[:3] == [interpreter(), "-m", "recipes.bert_mlm"]
        assert parse(bert_mlm.Options, "prog", arguments=words[3:]) == options

    def test_the_command_and_options_json_hold_options_of_several_values(self, tmp_path):
        kind = dataclasses.make_dataclass(
            "Options",
            [("names", tuple[str, ...], option(())), ("files", tuple[Path, ...], option(()))],
            bases=(SharedOptions,),
            kw_only=True,
        )
        options = kind(names=("u", "a v"), files=(Path("a b"), Path("c")))
        words = shlex.split(command("mine", options))
        assert parse(kind, "prog", arguments=words[words.index("--names") :]) == options
        path = tmp_path / "options.json"
        path.write_text(json.dumps({"options": to_json(options)}))
        assert from_json(kind, path) == options

    @pytest.mark.parametrize(
        ("values", "kind"), [({"epochs": "many"}, "int"), ({"clip_norm": "0.1"}, "float | None")]
    )
    def test_a_text_instead_of_a_number_names_its_file(self, values, kind, tmp_path):
        path = tmp_path / "options.json"
        path.write_text(json.dumps(values))
        with pytest.raises(OptionsError) as raised:
            parse(mnist.Options, "prog", arguments=["--options", str(path)])
        ((name, value),) = values.items()
        assert str(raised.value) == f"--options {path}: {name} {value!r}: must be {kind}"

    def test_the_command_names_a_module_outside_of_recipes(self):
        words = shlex.split(command("tiny_recipe", tiny_recipe.Options(seed=3)))
        assert words[1:] == ["-m", "tests.support.tiny_recipe", "--seed", "3"]

    def test_the_command_of_a_file_that_was_started_by_its_path(self, monkeypatch, tmp_path):
        module = types.ModuleType("elsewhere")
        module.__file__ = str(tmp_path / "my recipe.py")
        kind = dataclasses.make_dataclass("Options", [], bases=(SharedOptions,), kw_only=True)
        kind.__module__ = "elsewhere"
        monkeypatch.setitem(sys.modules, "elsewhere", module)
        words = shlex.split(command("my recipe", kind()))
        assert words[1:] == [module.__file__] and module_name(kind) == "my recipe"
        module.__file__ = mnist.__file__
        assert module_name(kind) == "recipes.mnist"

    def test_the_command_that_queries_a_run(self, monkeypatch):
        def words(options):
            found = shlex.split(predict_command(options))
            assert found[:3] == [interpreter(), "-m", "recipes.predict"]
            return found[3:]

        assert words(bert_mlm.Options(run_dir="a b")) == [
            "a b",
            "the loss is [MASK] over the batch",
        ]
        assert words(dna_melting.Options(run_dir="r")) == ["r", "ACGTTGCATGCCA"]
        assert words(mnist.Options(run_dir="r")) == ["r", "--help"]
        pair = shlex.split(predict_command(text_classification.Options(run_dir="r"), "a ||| b"))
        assert pair[3:] == ["r", "a ||| b"]
        # A recipe outside the package: nothing without predict(), its module is named with it.
        options = tiny_recipe.Options(run_dir="r")
        assert predict_command(options) is None
        monkeypatch.setattr(tiny_recipe, "predict", None, raising=False)
        assert words(options) == ["r", "--help", "--trust-module", "tests.support.tiny_recipe"]

    def test_the_command_starts_this_python(self, monkeypatch, tmp_path):
        """As `make` starts it, whose Python is not on the PATH; and where it is."""
        folder = tmp_path / ".venv" / "bin"
        folder.mkdir(parents=True)
        for name in ("python", "python3"):
            (folder / name).symlink_to(sys.executable)
        monkeypatch.setattr(sys, "executable", str(folder / "python3"))
        monkeypatch.setenv("PATH", "")
        assert interpreter() == str(folder / "python3")
        monkeypatch.chdir(tmp_path)
        assert interpreter() == ".venv/bin/python3"
        monkeypatch.setenv("PATH", str(folder))
        assert interpreter() == "python"
        monkeypatch.setenv("PATH", str(tmp_path / "other"))
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "python").symlink_to(sys.executable)
        assert interpreter() == ".venv/bin/python3"


class TestProblems:
    def test_all_are_reported_together(self):
        with pytest.raises(OptionsError) as caught:
            check(
                bert_mlm.Options(
                    epochs=-1,
                    base_learning_rate=float("nan"),
                    clip_norm=-1.0,
                    seed=-1,
                    num_heads=3,
                    batch_size_per_replica=4,
                    global_batch_size=8,
                    mlm_probability=0.0,
                    sequence_length=513,
                    early_stopping=2,
                    plateau_factor=0.1,
                    keep_best_mode="max",
                    profile="25:20",
                    resume="extend",
                )
            )
        assert sorted(str(caught.value).splitlines()) == [
            "--base-learning-rate nan: must be in (0, inf)",
            "--batch-size-per-replica 4 and --global-batch-size 8: pass only one of them",
            "--clip-norm -1.0: must be in (0, inf)",
            "--early-stopping needs --keep-best, for instance val_loss",
            "--epochs -1: must be in [0, 1e9]",
            "--hidden-dim 128: must be a multiple of --num-heads 3",
            "--keep-best-mode needs --keep-best or --reduce-on-plateau",
            "--mlm-probability 0.0: must be in (0, 1]",
            "--plateau-factor needs --reduce-on-plateau",
            "--profile 25:20: must be START:STOP, first and last step, for instance 20:25",
            "--resume extend needs --run-dir, the folder of the run",
            "--seed -1: must be in [0, 2147483647]",
            "--sequence-length 513: must be in [4, 512]",
        ]

    def test_without_epochs_nothing_is_chosen_by_them(self):
        assert problems(epochs=0) == []
        assert problems(epochs=0, keep_best="val_loss", early_stopping=1) == [
            "--keep-best: leave it out; --epochs 0 trains nothing",
            "--early-stopping: leave it out; --epochs 0 trains nothing",
        ]
        assert problems(epochs=0, validate_every=5) == [
            "--validate-every: leave it out; --epochs 0 trains nothing"
        ]
        assert all_problems(mnist.Options(epochs=0)) == ["--epochs 0: must be in [1, 1e9]"]

    @pytest.mark.parametrize(
        "text, window",
        [
            ("20:25", (20, 25)),
            ("1:1", (1, 1)),
            ("0:3", None),
            ("3", None),
            ("3:", None),
        ],
    )
    def test_a_window_of_steps(self, text, window):
        assert profile_window(text) == window
        assert bool(problems(profile=text)) == (window is None)

    def test_a_warm_up_ends_before_the_run(self):
        (problem,) = problems(warmup_steps=20, max_steps=20)
        assert problem == "--warmup-steps 20: must be less than --max-steps 20"
        assert not problems(warmup_steps=19, max_steps=20) and not problems(max_steps=20)

    @pytest.mark.parametrize(
        ("metric", "name"), [("accuracy", "val_accuracy"), ("eval_loss", "val_loss")]
    )
    def test_the_best_is_of_a_validation_metric(self, metric, name):
        (problem,) = problems(keep_best=metric)
        assert problem == f"--keep-best {metric}: must begin with val_, as {name} does"
        assert not problems(keep_best=name)

    def test_zero_where_it_means_none(self):
        assert not problems(weight_decay=0.0, warmup_steps=0, dropout=0.0, beta_2=0.0)

    @pytest.mark.parametrize("kind", RECIPES, ids=lambda kind: kind.__module__)
    def test_each_option_refuses_other_types_and_wrong_numbers(self, kind):
        """Also one that is added tomorrow."""
        for field in dataclasses.fields(kind):
            name = f"--{field.name.replace('_', '-')} "
            (found,) = all_problems(kind(**{field.name: [1, 2]}))
            assert found.startswith(f"{name}[1, 2]: must be")
            default = getattr(kind(), field.name)
            if metadata(kind, field.name)["within"]:
                huge = math.inf if "inf" in metadata(kind, field.name)["within"] else 10**400
                for value in (-1, math.nan if huge == math.inf else -huge, huge):
                    found = all_problems(kind(**{field.name: value}))
                    assert found[0].startswith(name)
            elif isinstance(default, str):
                assert all_problems(kind(**{field.name: ""})) == [
                    f"{name.strip()}: must not be empty"
                ]

    def test_another_backend(self, monkeypatch):
        import keras

        monkeypatch.setattr(keras.config, "backend", lambda: "jax")
        (found,) = problems()
        assert found.startswith("Keras runs on jax in this process, TensorFlow is needed")


def test_texts_and_lists_as_a_notebook_gives_them():
    for value in (["a"], (Path("a"),)):
        options = compare.Options(run_dirs=value, png="~/curves.png")
        assert all_problems(options) == []
        assert (options.run_dirs, options.png) == ((Path("a"),), Path.home() / "curves.png")
    for value in ("a", Path("a")):
        assert compare.Options(run_dirs=value).run_dirs == (Path("a"),)
    assert predict.Options(run_dir="run", inputs="a [MASK]").inputs == ("a [MASK]",)


def test_numbers_of_numpy_as_a_notebook_gives_them():
    options = mnist.Options(
        epochs=np.int64(3), max_steps=np.int32(7), clip_norm=np.float32(0.5), quiet=True
    )
    assert all_problems(options) == []
    values = to_json(options)
    assert (values["epochs"], values["max_steps"], values["clip_norm"]) == (3, 7, 0.5)
    kinds = [type(values[name]) for name in ("epochs", "max_steps", "clip_norm", "quiet")]
    assert kinds == [int, int, float, bool]
    (found,) = all_problems(mnist.Options(epochs=np.float64(3)))
    assert found.endswith("must be int")


def test_a_text_instead_of_a_number_shows_its_quotes():
    assert all_problems(mnist.Options(epochs="3")) == ["--epochs '3': must be int"]


def test_values_of_positional_options_that_cannot_be():
    for options, said in (
        (compare.Options(run_dirs=5), "RUN_DIRS 5: must be one or several texts or paths"),
        (predict.Options(run_dir="run", inputs=("a", "")), "INPUTS: must not be empty"),
        (predict.Options(run_dir="", inputs="a"), "RUN_DIR: must not be empty"),
        (mnist.Options(keep_best=""), "--keep-best: must not be empty"),
    ):
        assert all_problems(options) == [said]


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
        for line in (f"--options {path}", f"--options={path}"):
            options = parsed(bert_mlm.Options, f"{line} --seed 3")
            assert (options.epochs, options.vocabulary, options.seed) == (5, Path("vocab.txt"), 3)
            # The run's folder and how it resumes are not taken over.
            assert (options.run_dir, options.resume) == (None, "auto")
            assert str(options.options) == path

    def test_none_unsets_a_value(self, tmp_path):
        first = text_classification.Options(
            batch_size_per_replica=16, clip_norm=1.0, keep_best="val_loss", init_from=Path("a")
        )
        path = self.write(tmp_path / "options.json", {"options": to_json(first)})
        line = "--batch-size none --global-batch-size 32 --clip-norm none --keep-best=none"
        options = parsed(text_classification.Options, f"--options {path} {line} --init-from none")
        assert options == text_classification.Options(global_batch_size=32, options=Path(path))
        assert parsed(text_classification.Options, f"--options {path}").clip_norm == 1.0

    def test_none_elsewhere_is_a_value(self, capsys):
        line = "--lr-scaling none --strategy none --preset none --run-dir none"
        options = parsed(text_classification.Options, line)
        assert (options.lr_scaling, options.strategy, options.preset) == ("none",) * 3
        assert options.run_dir == Path("none")
        for line in ("--epochs none", "--clip-norm None"):
            with pytest.raises(SystemExit):
                parsed(mnist.Options, line)
            kind = {"--epochs": "int", "--clip-norm": "float"}[line.split()[0]]
            assert f"invalid {kind} value: " in capsys.readouterr().err

    def test_the_command_of_a_run_unsets_a_default_of_its_recipe(self):
        options = tiny_recipe.Options(global_batch_size=None, batch_size_per_replica=4)
        words = shlex.split(command("tiny_recipe", options))
        assert words[3:] == ["--batch-size-per-replica", "4", "--global-batch-size", "none"]
        assert parse(tiny_recipe.Options, "prog", arguments=words[3:]) == options

    def test_a_run_stands_for_its_file(self, tmp_path):
        self.write(tmp_path / "options.json", {"options": to_json(mnist.Options(epochs=5))})
        assert parsed(mnist.Options, f"--options {tmp_path}").epochs == 5
        (tmp_path / "options.json").unlink()
        with pytest.raises(OptionsError, match=f"--options {tmp_path}: contains no options.json"):
            parsed(mnist.Options, f"--options {tmp_path}")

    @pytest.mark.parametrize(
        "content, said",
        [
            (b'{"epochs": 1, "epoch": 2, "lr": 0.1}', "unknown options epoch, lr"),
            (b"[1]", "not a JSON object"),
            (b"\xff", "can't decode byte"),
            (b'{"options": true}', "options must be an object, found true"),
            (b"[" * 100000, "nested too deeply"),
            (None, "No such file"),
        ],
    )
    def test_what_is_not_options(self, tmp_path, content, said):
        path = tmp_path / "options.json"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises((OptionsError, RunError), match=f"{path}: .*{said}"):
            parsed(bert_mlm.Options, f"--options {path}")
