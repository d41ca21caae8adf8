import keras
import numpy as np
import pytest
import tensorflow as tf

from callbacks.image_summaries import ImageSummaries
from callbacks.tensorboard import TensorBoard


@pytest.fixture
def made(tmp_path):
    """The model says class 1 where the first pixel is bright, class 0 elsewhere."""
    model = keras.Sequential(
        [keras.Input((2, 2, 1)), keras.layers.Flatten(), keras.layers.Dense(3)]
    )
    kernel = np.zeros((4, 3), "float32")
    kernel[0, 1] = 1.0
    model.set_weights([kernel, np.array([0.5, 0, 0], "float32")])
    images = np.zeros((7, 2, 2, 1), "float32")
    images[[1, 2, 6], 0, 0, 0] = 1.0
    labels = np.array([0, 1, 1, 2, 0, 0, 0])
    callback = ImageSummaries(
        TensorBoard(tmp_path / "logs"), images, labels, ["a", "b", "c|d"], batch_size=3
    )
    callback.set_model(model)
    return callback


def test_rows_are_true_classes_and_columns_predicted_ones(made):
    assert made.count(made.outputs()).tolist() == [0, 1, 1, 0, 0, 0, 1]
    assert made.confusion_matrix.tolist() == [[3, 1, 0], [0, 2, 0], [1, 0, 0]]


def test_images_and_matrix_are_shown_at_the_step_of_the_run(made, tmp_path):
    made.step = 12
    made.on_epoch_end(0)
    made.tensorboard.flush()
    (path,) = (tmp_path / "logs" / "test").iterdir()
    found = {}
    for raw in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
        event = tf.compat.v1.Event.FromString(raw)
        for value in event.summary.value:
            found[value.tag] = (event.step, tf.make_ndarray(value.tensor))
    assert found.keys() == {"images", "confusion_matrix", "confusion_counts"}
    assert {step for step, _ in found.values()} == {12}
    table = found["confusion_counts"][1].item().decode()
    assert "| **a** | 3 | 1 | 0 |" in table and "| **c&#124;d** | 1 | 0 | 0 |" in table


def test_captions_are_of_their_images(made, monkeypatch):
    from callbacks import pictures

    seen = []
    stock = pictures.captioned_images
    monkeypatch.setattr(pictures, "captioned_images", lambda *a: seen.append(a[1]) or stock(*a))
    made.on_epoch_end(0)
    assert seen[0][3] == ("true c|d", "predicted a", False)
    assert seen[0][6] == ("true a", "predicted b", False) and seen[0][1] == (
        "true b",
        "predicted b",
        True,
    )


def test_a_run_that_resumed_after_its_last_epoch_still_counts(made, tmp_path):
    made.on_train_end()
    assert made.confusion_matrix.sum() == 7 and not (tmp_path / "logs").exists()


def test_a_worker_that_is_not_the_chief_counts_too(made):
    made.tensorboard = TensorBoard(None)
    made.on_epoch_end(0)
    assert made.confusion_matrix.sum() == 7
