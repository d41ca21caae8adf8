import dataclasses
import json
import shlex
from pathlib import Path

import pytest

from recipes import bert_mlm
from recipes import run as runs
from recipes.options import OptionsError, SharedOptions, check, parse, to_json

SHARED = """
dataset strategy replicas precision batch-size-per-replica global-batch-size base-learning-rate
lr-scaling epochs max-steps max-examples validate-every test-every checkpoint-every
keep-checkpoints resume clip-norm accumulate-steps steps-per-execution jit seed deterministic
run-dir options cache-dir log-every quiet
""".split()


def faults(**values):
    return bert_mlm.Options(**values).faults()


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

    def test_the_defaults_have_no_fault(self):
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

    def test_the_command_that_continues_a_run_gives_the_same_options(self):
        options = bert_mlm.Options(
            dataset="a text.txt", epochs=3, quiet=True, run_dir=Path("r"), weight_decay=0.0
        )
        words = shlex.split(runs.command("bert_mlm", options))
        assert words[:3] == ["python", "-m", "recipes.bert_mlm"]
        assert parse(bert_mlm.Options, words[3:]) == options


class TestFaults:
    def test_all_are_reported_together(self):
        with pytest.raises(OptionsError) as caught:
            parse(
                bert_mlm.Options,
                "--epochs 0 --base-learning-rate nan --clip-norm -1 --seed -1 --num-heads 3 "
                "--batch-size-per-replica 4 --global-batch-size 8 --mlm-probability 0 "
                "--sequence-length 3 --early-stopping 2 --keep-best val_los".split(),
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
            "--sequence-length 3: must be 4 or more",
            "--keep-best val_los: must be one of val_loss, val_cross_entropy, val_accuracy",
        ):
            assert part in lines

    @pytest.mark.parametrize(
        "name",
        [
            *("replicas", "batch_size_per_replica", "global_batch_size", "epochs", "max_steps"),
            *("max_examples", "validate_every", "test_every", "checkpoint_every"),
            *("keep_checkpoints", "accumulate_steps", "steps_per_execution", "log_every"),
            *("vocabulary_size", "layers", "heads", "width"),
        ],
    )
    def test_counts_are_above_zero(self, name):
        option = "--" + name.replace("_", "-")
        for value in (0, -1):
            assert f"{option} {value}: must be more than 0" in faults(**{name: value})

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
    @pytest.mark.parametrize(
        "name",
        [
            *("base_learning_rate", "clip_norm", "weight_decay", "beta_1", "beta_2", "dropout"),
            "mlm_probability",
        ],
    )
    def test_numbers_are_finite_and_not_negative(self, name, value):
        assert len(faults(**{name: value})) == 1
        assert faults(**{name: value})[0].startswith(f"--{name.replace('_', '-')} {value}: must ")

    def test_zero_where_it_means_none(self):
        assert not faults(weight_decay=0.0, warmup_steps=0, dropout=0.0, beta_1=0.0)

    def test_a_length_over_the_models_limit(self):
        assert faults(sequence_length=513) == [
            "--sequence-length 513: the model takes at most 512 tokens"
        ]
        assert not faults(sequence_length=512)

    def test_a_run_dir_that_is_a_file(self, tmp_path):
        (tmp_path / "file").touch()
        assert faults(run_dir=tmp_path / "file") == [
            f"--run-dir {tmp_path / 'file'}: is a file, a folder is expected"
        ]

    def test_a_vocabulary_beside_a_preset(self):
        found = faults(preset="bert_tiny_en_uncased", vocabulary=Path("vocab.txt"))
        assert found == ["--vocabulary: the preset bert_tiny_en_uncased has its own"]

    def test_what_does_not_go_with_the_devices(self, monkeypatch):
        monkeypatch.delenv("TF_CONFIG", raising=False)
        options = SharedOptions(
            strategy="mirrored", replicas=3, global_batch_size=8, jit="on", epochs=2
        )
        check(options)
        with pytest.raises(OptionsError) as caught:
            runs.prepare(options)
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
            # Where the run lies and how it goes on are not taken over.
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
