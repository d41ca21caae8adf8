import logging

import pytest
import tensorflow as tf

from callbacks.errors import CannotSave
from callbacks.tensorboard import TensorBoard, tag_of
from tests.support import processes


def written(folder):
    """(run, tag, step, value) of everything that TensorBoard reads."""
    return processes.events(folder)


@pytest.mark.parametrize(
    "name, tag",
    [
        ("loss", "1_loss/loss"),
        ("cross_entropy", "1_loss/cross_entropy"),
        ("macro_f1", "2_quality/macro_f1"),
        ("learning_rate", "3_optimizer/learning_rate"),
        ("tokens_per_second", "4_speed/tokens_per_second"),
        ("something", "5_more/something"),
    ],
)
def test_tags_are_grouped(name, tag):
    assert tag_of(name) == tag


def test_each_split_is_a_run_of_its_own(tmp_path):
    board = TensorBoard(tmp_path / "logs")
    board.on_record({"event": "step", "step": 3, "epoch": 1, "loss": 1.0, "learning_rate": 0.5})
    epoch = {"loss": 1.0, "accuracy": 0.25, "val_loss": 2.0, "examples_per_second": 7.0}
    board.on_record({"event": "epoch", "step": 4, "epoch": 1, **epoch})
    board.on_record({"event": "evaluation", "step": 5, "epoch": 2, "split": "test", "loss": 3.0})
    board.flush()
    assert written(tmp_path) == [
        ("test", "1_loss/loss", 5, 3.0),
        ("train", "1_loss/loss", 3, 1.0),
        ("train", "2_quality/accuracy", 4, 0.25),
        ("train", "3_optimizer/learning_rate", 3, 0.5),
        ("validation", "1_loss/loss", 4, 2.0),
    ]


def test_an_evaluation_is_one_point(tmp_path):
    """In mid-epoch at an epoch's end, and at that end."""
    board = TensorBoard(tmp_path / "logs")
    board.on_record(
        {"event": "evaluation", "step": 4, "epoch": 1, "split": "validation", "loss": 2.0}
    )
    board.on_record({"event": "epoch", "step": 4, "epoch": 1, "val_loss": 2.0})
    board.flush()
    assert written(tmp_path) == [("validation", "1_loss/loss", 4, 2.0)]


def step(board, number):
    board.on_record({"event": "step", "step": number, "epoch": 1, "loss": float(number)})


def test_what_came_after_the_checkpoint_is_cut_off(tmp_path):
    board = TensorBoard(tmp_path / "logs")
    step(board, 1)
    state = board.get_state()
    step(board, 2)
    board.on_record({"event": "evaluation", "step": 2, "epoch": 1, "split": "test", "loss": 2.0})
    board.flush()
    assert len(written(tmp_path)) == 3
    again = TensorBoard(tmp_path / "logs")
    again.set_state(state)
    step(again, 5)
    again.flush()
    assert written(tmp_path) == [
        ("train", "1_loss/loss", 1, 1.0),
        ("train", "1_loss/loss", 5, 5.0),
    ]


def test_a_file_that_somebody_cut_is_named(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("recipes"), "propagate", True)
    board = TensorBoard(tmp_path / "logs")
    step(board, 1)
    state = board.get_state()
    path = next((tmp_path / "logs" / "train").iterdir())
    path.write_bytes(path.read_bytes()[:-5])
    TensorBoard(tmp_path / "logs").set_state(state)
    assert f"{path}: something cut it" in caplog.text
    path.unlink()
    caplog.clear()
    TensorBoard(tmp_path / "logs").set_state(state)
    assert f"{path}: something cut it" in caplog.text


def test_a_full_disk_is_not_taken_for_memory(tmp_path, monkeypatch):
    def full(path):
        node = "{{function_node __wrapped__CreateSummaryFileWriter_device_/job:localhost/CPU:0}}"
        flushed = "\n\tFailed to flush 1 events"
        text = f"{node} {path}/{'x' * 200}; No space left on device{flushed}"
        raise tf.errors.ResourceExhaustedError(None, None, text)

    monkeypatch.setattr(tf.summary, "create_file_writer", full)
    words = f"^TensorBoard's files in {tmp_path}/logs cannot be written: No space left on device$"
    with pytest.raises(CannotSave, match=words):
        step(TensorBoard(tmp_path / "logs"), 1)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "logs").touch()
    with pytest.raises(CannotSave, match="TensorBoard's files in .* cannot be written"):
        step(TensorBoard(tmp_path / "logs"), 1)


def test_a_worker_that_is_not_the_chief_writes_nothing():
    board = TensorBoard(None)
    step(board, 1)
    with board.writing("test", 3):
        tf.summary.scalar("x", 1.0)
    board.set_state({"files": {"train/x": 5}})
    assert board.get_state()["files"] == {}
