import collections
import concurrent.futures
import copy
import json
import pickle
import threading
import time

import keras
import pytest

from callbacks.late_numbers import CallbackList, LateNumber, LateNumbers, unread
from callbacks.steps import StepCallback
from callbacks.stopping import StopEvaluation


@pytest.fixture
def numbers(on_device, monkeypatch):
    """Two numbers of a device, and the names of those that were read."""
    monkeypatch.setattr(keras.ops, "convert_to_numpy", lambda value: value)
    logs = {name: on_device(name, value) for name, value in (("loss", 2.5), ("accuracy", 0.5))}
    return LateNumbers(logs), on_device.reads


class TestLateNumber:
    def test_two_threads_read_it_once(self, on_device, monkeypatch):
        reading, at_once = threading.Semaphore(1), []

        def convert(value):
            at_once.append(not reading.acquire(blocking=False))
            time.sleep(0.05)
            reading.release()
            return float(value)

        monkeypatch.setattr(keras.ops, "convert_to_numpy", convert)
        number = LateNumber(on_device("loss", 2.5))
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            assert list(pool.map(float, [number] * 4)) == [2.5] * 4
        assert at_once == [False] and on_device.reads == ["loss"]

    def test_a_reading_that_failed_is_repeated(self, on_device, monkeypatch):
        errors = [SystemError("NULL without an exception")]

        def convert(value):
            if errors:
                raise errors.pop()
            return float(value)

        monkeypatch.setattr(keras.ops, "convert_to_numpy", convert)
        number = LateNumber(on_device("loss", 2.5))
        with pytest.raises(SystemError):
            float(number)
        assert float(number) == 2.5

    def test_it_knows_its_device(self, on_device):
        assert LateNumber(on_device("loss", 1.0, "/device:GPU:0")).device == "/device:GPU:0"
        assert LateNumber(1.0).device == ""


class TestLateNumbers:
    def test_only_what_is_looked_up_is_read_and_only_once(self, numbers):
        late, reads = numbers
        assert (
            "loss" in late and len(late) == 2 and list(late) == ["accuracy", "loss"] and not reads
        )
        assert (late["loss"], late["loss"], late.get("loss"), late.get("x", 1)) == (
            2.5,
            2.5,
            2.5,
            1,
        )
        assert reads == ["loss"] and type(late["loss"]) is float

    def test_what_is_not_read_stays_a_tensor(self, numbers):
        late, reads = numbers
        assert float(unread(late, "accuracy")) == 0.5 and unread({"loss": 1}, "loss") == 1

    @pytest.mark.parametrize(
        "copied",
        [
            *(dict, lambda late: {**late}, lambda late: late.copy(), lambda late: late | {}),
            *(lambda late: {} | late, lambda late: dict(late.items())),
            lambda late: json.loads(json.dumps(late)),
            lambda late: dict(zip(late, late.values(), strict=True)),
            lambda late: {name: late.pop(name) for name in list(late)},
            lambda late: {name: late.pop(name, None) for name in ("accuracy", "loss")},
            lambda late: eval(repr(late)),
            lambda late: dict(collections.ChainMap(late)),
            lambda late: {name: late.setdefault(name, 1.0) for name in ("accuracy", "loss")},
            lambda late: dict(late.popitem() for _ in range(2)),
        ],
    )
    def test_copies_are_of_floats(self, numbers, copied):
        late, _ = numbers
        found = copied(late)
        assert type(found) is dict and found == {"accuracy": 0.5, "loss": 2.5}
        assert all(type(value) is float for value in found.values())

    def test_it_can_be_changed_copied_and_stored(self, numbers):
        late, _ = numbers
        late["mine"] = "text"
        late.update(other=1)
        assert late.setdefault("third", 3) == 3 and late["mine"] == "text" and late["other"] == 1
        del late["accuracy"]
        expected = {"loss": 2.5, "mine": "text", "other": 1, "third": 3}
        assert late == expected == copy.deepcopy(late) == pickle.loads(pickle.dumps(late))

    def test_it_equals_its_numbers(self, numbers):
        late, _ = numbers
        assert late == {"accuracy": 0.5, "loss": 2.5} and late != {"loss": 2.5}
        assert not late != {"accuracy": 0.5, "loss": 2.5}

    def test_a_missing_name_is_a_key_error(self, numbers):
        with pytest.raises(KeyError):
            numbers[0]["missing"]
        with pytest.raises(KeyError):
            numbers[0].pop("missing")

    def test_what_is_no_number_stays_and_dicts_are_flattened_as_in_keras(self, numbers):
        late = LateNumbers({"a": {"b": [1, 2]}, "c": "text", "d": 3})
        assert late == {"b": [1, 2], "c": "text", "d": 3.0}


class TestCallbackList:
    """A callback of this package or of Keras reads what it looks up; others get floats."""

    @pytest.fixture(autouse=True)
    def convert(self, monkeypatch):
        monkeypatch.setattr(keras.ops, "convert_to_numpy", lambda value: value)

    @pytest.mark.parametrize("name", ["on_train_batch_end", "on_test_batch_end"])
    def test_a_batch_is_read_only_for_a_callback_that_looks(self, name, on_device):
        seen = []

        class Looks(StepCallback):
            def on_train_batch_end(self, batch, logs=None):
                seen.append((len(on_device.reads), logs["loss"] if batch == 1 else None))

            on_test_batch_end = on_train_batch_end

        class Idle(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                pass

        stock = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen.append((len(on_device.reads), None))
        )
        callbacks = CallbackList([Looks(), Idle(), stock])
        for batch in range(3):
            getattr(callbacks, name)(batch, {"loss": on_device("loss", 2.0)})
        if name == "on_test_batch_end":
            assert seen == [(0, None), (0, 2.0), (1, None)]
        else:
            assert seen == [(0, None), (0, None), (0, 2.0), (1, None), (1, None), (1, None)]

    def test_what_ends_an_evaluation_reads_nothing(self, on_device):
        callbacks = CallbackList([StopEvaluation(lambda: False)])
        callbacks.on_test_batch_end(0, {"loss": on_device("loss", 2.0)})
        assert on_device.reads == []

    @pytest.mark.parametrize("method", ["on_train_batch_end", "on_batch_end", "on_test_batch_end"])
    def test_others_get_a_plain_dict(self, method, on_device):
        seen = []
        other = type(
            "Other",
            (keras.callbacks.Callback,),
            {method: lambda self, batch, logs=None: seen.append(logs)},
        )
        name = "on_test_batch_end" if method == "on_test_batch_end" else "on_train_batch_end"
        getattr(CallbackList([other()]), name)(0, {"loss": on_device("loss", 2.0)})
        assert seen == [{"loss": 2.0}] and type(seen[0]) is dict and on_device.reads == ["loss"]
