"""Rejects callbacks and calls of `fit()` that no checkpoint can repeat."""

import functools

import keras
import numpy as np
import pytest

from callbacks import checkpoint
from data import arrays
from tests.support import tiny_recipe
from tests.support.refusals import refused
from training import fit_checks
from training.errors import RunError


class TestCallbacks:
    @pytest.mark.parametrize(
        "callback, remedy",
        [
            (keras.callbacks.EarlyStopping(), "--early-stopping, which restores the best weights"),
            (keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2), "a schedule of"),
            (keras.callbacks.ModelCheckpoint("x.keras"), "--checkpoint-every and --keep-best"),
            (keras.callbacks.ReduceLROnPlateau(), "--reduce-on-plateau"),
            (keras.callbacks.SwapEMAWeights(), "pass use_ema=True to the optimizer"),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_state_that_no_checkpoint_keeps(self, tmp_path, callback, remedy):
        said = refused(tmp_path, parts={"extra": [callback]})
        assert f"keras.callbacks.{type(callback).__name__} has state" in said
        assert remedy in said and "get_state() and set_state()" in said
        assert "\n" not in said

    def test_a_backup_is_needless(self, tmp_path):
        callback = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
        assert "since the same command resumes" in refused(tmp_path, parts={"extra": [callback]})

    @pytest.mark.parametrize("later", [False, True])
    def test_what_would_begin_again(self, tmp_path, later):
        """A table, and the batches of TensorBoard, where the run resumes."""

        def added(callback):
            def fit(model, data, fit_options):
                fit_options["callbacks"].append(callback)
                model.fit(data, **fit_options)

            return {"fit": fit} if later else {"extra": [callback]}

        table = keras.callbacks.CSVLogger(str(tmp_path / "epochs.csv"))
        assert "pass append=True, or read metrics.jsonl" in refused(tmp_path, parts=added(table))
        board = keras.callbacks.TensorBoard(str(tmp_path / "logs"), update_freq="batch")
        assert "TensorBoard(update_freq=1) counts" in refused(tmp_path, parts=added(board))

    def test_two_of_one_name(self, tmp_path):
        said = refused(tmp_path, parts={"extra": [tiny_recipe.Counter(), tiny_recipe.Counter()]})
        assert "two callbacks of class Counter" in said

    def test_a_callback_without_state_is_welcome(self):
        assert fit_checks.stateful({}, [keras.callbacks.TerminateOnNaN()], None) == {}

    @pytest.mark.long
    def test_one_that_is_missing_on_resume(self, tmp_path):
        options = tiny_recipe.Options(run_dir=tmp_path / "run")
        with pytest.raises(KeyboardInterrupt):
            tiny_recipe.main(options, extra=[tiny_recipe.Counter(), tiny_recipe.StopAfter(4)])
        with pytest.raises(RunError, match=r"holds the state of Counter.*extra=\[\.\.\.\]"):
            tiny_recipe.main(options)
        counter = tiny_recipe.Counter()
        assert tiny_recipe.main(options, extra=[counter])["resumed_from_step"] == 4
        assert counter.count == 18  # with the four steps of the first process


class TestFit:
    def test_arrays_instead_of_the_batches(self, tmp_path):
        def fit(model, data, fit_options):
            model.fit(*tiny_recipe.splits()["train"], **fit_options)

        said = refused(tmp_path, parts={"fit": fit})
        assert said.startswith("model.fit() got a ndarray") and "model.fit(train_data, **" in said

    def test_without_the_callbacks_of_the_run(self, tmp_path):
        def fit(model, data, fit_options):
            model.fit(data, steps_per_epoch=1)

        said = refused(tmp_path, parts={"fit": fit})
        assert said.startswith("model.fit() lacks callbacks of the run")

    def test_a_callback_that_is_added_later(self, tmp_path):
        def fit(model, data, fit_options):
            fit_options["callbacks"].append(keras.callbacks.EarlyStopping())
            model.fit(data, **fit_options)

        assert "EarlyStopping has state" in refused(tmp_path, parts={"fit": fit})

    def test_a_model_that_is_compiled_again(self, tmp_path):
        """Keras's own step would count the padding of last batches."""

        def fit(model, data, fit_options):
            model.compile(**tiny_recipe.compile_arguments(tiny_recipe.Options(), 0.1))

        said = refused(tmp_path, parts={"fit": fit})
        assert said.startswith("model.compile() was called after run.prepare()")
        assert "compile before run.prepare()" in said and len(said.splitlines()) == 1

    def test_a_second_run_of_one_model(self, tmp_path):
        """Compiled again between the two, as where layers are unfrozen; by a `CallbackList`."""
        models = []

        def build(options):
            if not models:
                models.append(tiny_recipe.build_model(options))
            return models[0]

        def fit(model, data, fit_options):
            fit_options["callbacks"] = keras.callbacks.CallbackList(fit_options["callbacks"])
            model.fit(data, **fit_options)

        for name in ("first", "second"):
            options = tiny_recipe.Options(run_dir=tmp_path / name, max_steps=1)
            assert tiny_recipe.main(options, build=build, fit=fit)["steps"] == 1

    def test_a_callback_of_steps_that_is_added_later(self, tmp_path):
        def fit(model, data, fit_options):
            fit_options["callbacks"].append(tiny_recipe.Counter())
            model.fit(data, **fit_options)

        said = refused(tmp_path, parts={"fit": fit})
        assert said == "Counter is a StepCallback: pass it as run.prepare(extra=[...])"

    @pytest.mark.parametrize("form", ["nested", "alone"])
    def test_callbacks_in_each_form_that_keras_takes(self, tmp_path, form):
        def fit(model, data, fit_options):
            of_run = fit_options["callbacks"]
            added = keras.callbacks.TerminateOnNaN()
            model.fit(
                data, **fit_options | {"callbacks": added if form == "alone" else [of_run, added]}
            )

        if form == "alone":
            assert "lacks callbacks of the run" in refused(tmp_path, parts={"fit": fit})
            return
        options = tiny_recipe.Options(run_dir=tmp_path / "run", max_steps=1)
        assert tiny_recipe.main(options, fit=fit)["steps"] == 1

    @pytest.mark.parametrize("comes_first", [False, True])
    def test_a_callback_that_is_added_later_ends_the_run_before_its_last_save(
        self, tmp_path, comes_first
    ):
        """After a kill in the test the run would train on."""

        class Stop(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                self.model.stop_training = True

        def fit(model, data, fit_options):
            callbacks = fit_options["callbacks"]
            fit_options["callbacks"] = [Stop(), *callbacks] if comes_first else [*callbacks, Stop()]
            model.fit(data, **fit_options)
            raise KeyboardInterrupt

        options = tiny_recipe.Options(run_dir=tmp_path / "run")
        with pytest.raises(KeyboardInterrupt):
            tiny_recipe.main(options, fit=fit)
        newest = checkpoint.newest(tmp_path / "run" / "checkpoints")
        assert newest.step == 9 and newest.state["finished"]
        assert tiny_recipe.main(options)["steps"] == 9

    def test_no_training_at_all(self, tmp_path):
        said = refused(tmp_path, parts={"fit": lambda *_: None})
        assert said.startswith("run.finish() was called without a training")

    @pytest.mark.long
    def test_a_second_one(self, tmp_path):
        def fit(model, data, fit_options):
            model.fit(data, **fit_options)
            model.fit(data, **fit_options)

        with pytest.raises(RunError, match="called a second time: a run is one training"):
            tiny_recipe.main(tiny_recipe.Options(run_dir=tmp_path / "run"), fit=fit)

    @pytest.mark.long
    def test_after_the_run_all_is_as_in_keras(self, tmp_path):
        models = []
        options = tiny_recipe.Options(run_dir=tmp_path / "run")
        tiny_recipe.main(options, inside=lambda run, model: models.append(model))
        history = models[0].fit(*tiny_recipe.splits()["train"], verbose=0)
        assert len(history.history["loss"]) == 1


LEFT_OUT = object()


def changing(**changes):
    """A program that changes arguments of the run's `fit()`, or leaves them out."""

    def fit(model, data, fit_options):
        arguments = (fit_options | changes).items()
        model.fit(data, **{name: value for name, value in arguments if value is not LEFT_OUT})

    return {"fit": fit}


class TestArguments:
    """Arguments that `fit()` ignores, or with which it trains other steps than the run reports."""

    @pytest.mark.parametrize(
        "changes, parts",
        [
            ({"epochs": 5}, ["model.fit(epochs=...)", "5 instead of 2; --epochs and --max-steps"]),
            ({"initial_epoch": 1}, ["1 instead of 0; the checkpoint decides"]),
            ({"steps_per_epoch": 4}, ["4 instead of 9", "run.plan() decide"]),
            ({"steps_per_epoch": None}, ["None instead of 9"]),
            (
                {"steps_per_epoch": LEFT_OUT},
                ["model.fit() lacks steps_per_epoch: call model.fit("],
            ),
            (
                {"validation_data": None},
                ["model.fit(validation_data=...)", "validation=...) decides"],
            ),
            ({"batch_size": 8}, ["--batch-size-per-replica or --global-batch-size"]),
            ({"sample_weight": np.ones(72)}, ["pass them to data.arrays.training_data()"]),
            ({"y": np.ones(72)}, ["model.fit(y=...)", "have the labels", "leave out y"]),
            (
                {"validation_split": 0.2},
                ["pass the validation split to run.prepare(validation=...)"],
            ),
            (
                {"validation_steps": 1},
                ["validates other batches after each epoch", "and leave out validation_steps"],
            ),
            ({"validation_freq": 0}, ["validation_freq=0): expected a number of epochs"]),
            ({"validation_freq": (1,)}, ["validation_freq=(1,)): expected", "or a list of epochs"]),
        ],
        ids=lambda value: next(iter(value)),
    )
    def test_one_that_is_not_the_run_s(self, tmp_path, changes, parts):
        said = refused(tmp_path, parts=changing(**changes))
        assert all(part in said for part in parts) and "\n" not in said

    @pytest.mark.parametrize("freq", [3, [4]])
    def test_a_validation_that_never_comes(self, tmp_path, freq):
        """Beside options that compare its values."""
        parts = changing(validation_freq=freq)
        said = refused(tmp_path, parts=parts, keep_best="val_loss", early_stopping=2)
        assert said.startswith("--keep-best, --early-stopping: model.fit(validation_freq=")
        assert said.endswith("validates after none of the 2 epochs")

    def test_keras_s_defaults_are_no_change(self, tmp_path):
        options = tiny_recipe.Options(run_dir=tmp_path / "run", max_steps=1)
        parts = changing(validation_split=0.0, initial_epoch=LEFT_OUT)
        assert tiny_recipe.main(options, **parts)["steps"] == 1

    @pytest.mark.long
    def test_others_are_keras_s(self, tmp_path):
        parts = changing(verbose=2, shuffle=True, validation_freq=2)
        options = tiny_recipe.Options(run_dir=tmp_path / "run")
        with pytest.warns(UserWarning, match="shuffle=True"):
            results = tiny_recipe.main(options, **parts)
        assert len(results["history"]["val_loss"]) == 1


class TestClassWeights:
    """`fit(class_weight=...)` fails within Keras, after `run.prepare()`."""

    @pytest.mark.parametrize(
        "class_weight, part",
        [
            ("balanced", "class_weight='balanced'): expected weights by class"),
            ([1.0, 3.0], "class_weight=[1.0, 3.0]): expected weights by class"),
            ({}, "class_weight={}): expected weights by class, for instance {0: 1.0, 1: 3.0}"),
            ({"0": 1.0}, "'0' is not the number of a class"),
            ({0: -1.0, 1: 1.0}, "the class 0 has the weight -1.0: expected numbers of at least 0"),
            ({0: float("nan")}, "the class 0 has the weight nan"),
            ({0: 2.0}, "the labels have classes beyond 0, the last one with a weight"),
        ],
        ids=str,
    )
    def test_weights_that_are_wrong(self, tmp_path, class_weight, part):
        said = refused(tmp_path, parts=changing(class_weight=class_weight))
        assert said.startswith("model.fit(class_weight=") and part in said and "\n" not in said

    def test_labels_below_zero(self):
        error = "indices[0] = -1 is not in [0, 2) [Op:MapDataset]"
        said = fit_checks._beyond_class_weight({0: 1.0, 1: 3.0}, error)
        assert said == (
            "model.fit(class_weight=...): the labels contain -1: number the classes from 0"
        )

    def test_numbers_of_numpy(self, tmp_path):
        weights = dict(zip(np.arange(2), np.array([1.0, 3.0], "float32"), strict=True))
        options = tiny_recipe.Options(run_dir=tmp_path / "run", max_steps=1)
        assert tiny_recipe.main(options, **changing(class_weight=weights))["steps"] == 1

    def message(self, folder, **changes):
        def inside(run, model):
            model.fit = functools.partial(model.fit, class_weight={0: 1.0, 1: 3.0})

        options = tiny_recipe.Options(run_dir=folder / "run")
        with pytest.raises(RunError, match="^model.fit.class_weight=....: ") as caught:
            tiny_recipe.main(options, inside=inside, **changes)
        assert not (folder / "run").exists() and "\n" not in str(caught.value)
        return str(caught.value)

    def test_beside_weights_of_the_examples(self, tmp_path):
        def pipeline(x, y, **named):
            return arrays.training_data(x, y, np.ones(len(y)), **named)

        assert "the training data have weights already" in self.message(tmp_path, pipeline=pipeline)

    def test_of_several_outputs(self, tmp_path):
        def build(options):
            inputs = keras.Input((6,))
            return keras.Model(inputs, [keras.layers.Dense(2)(inputs) for _ in range(2)])

        def arguments(options, learning_rate):
            return dict(optimizer="adam", loss=["mse", "mse"])

        def pipeline(x, y, **named):
            return arrays.training_data(x, (x[:, :2], x[:, 2:4]), **named)

        changes = dict(build=build, arguments=arguments, pipeline=pipeline)
        assert "the model has several outputs" in self.message(tmp_path, **changes)


class TestStatesThatAreLost:
    """Of a callback of Keras's kind no checkpoint keeps anything."""

    class Counts(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.seen = 0

    class Prints(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.short = True

    def test_a_run_that_resumes_names_them(self, tmp_path):
        options = tiny_recipe.Options(run_dir=tmp_path / "run")
        with pytest.raises(KeyboardInterrupt):
            tiny_recipe.main(options, extra=[tiny_recipe.StopAfter(4)])
        extra = [self.Counts(), self.Prints(), keras.callbacks.TerminateOnNaN()]
        notes = tiny_recipe.main(options, extra=extra)["notes"]
        assert len(notes) == 1
        assert notes[0].startswith("Counts: no checkpoint keeps the state of such a callback")

    def test_a_new_run_has_none(self):
        assert fit_checks.lost_states_note([self.Counts()], None) is None
