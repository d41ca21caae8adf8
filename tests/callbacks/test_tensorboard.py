import html
import re

import pytest
import tensorflow as tf
from tensorboard import plugin_util

from callbacks.errors import CannotSave
from callbacks.tensorboard import TensorBoard, escape
from tests.support import processes


@pytest.fixture
def board(tmp_path):
    return TensorBoard(tmp_path)


def written(board):
    """(tag, step, value) of everything that TensorBoard reads."""
    board.flush()
    return processes.events(board.folder)


def test_a_run_is_one_entry_and_tags_name_the_split(board, tmp_path):
    board.on_record({"event": "step", "step": 3, "epoch": 1, "loss": 1.0, "learning_rate": 0.5})
    epoch = {"loss": 1.0, "accuracy": 0.25, "val_loss": 2.0, "examples_per_second": 7.0}
    board.on_record({"event": "epoch", "step": 4, "epoch": 1, "learning_rate": 0.5, **epoch})
    board.on_record({"event": "evaluation", "step": 5, "epoch": 2, "split": "test", "loss": 3.0})
    assert written(board) == [
        ("accuracy/train", 4, 0.25),
        ("loss/test", 5, 3.0),
        ("loss/train", 3, 1.0),  # the mean of the epoch would stand in the chart of the steps
        ("loss/validation", 4, 2.0),
        ("optimizer/learning_rate", 3, 0.5),
    ]
    assert len(list(tmp_path.iterdir())) == 1


def step(board, number):
    board.on_record({"event": "step", "step": number, "epoch": 1, "loss": float(number)})


def test_what_came_after_the_checkpoint_is_cut_off(board, tmp_path):
    step(board, 1)
    state = board.get_state()
    step(board, 2)
    assert len(written(board)) == 2
    again = TensorBoard(tmp_path)
    again.set_state(state)
    step(again, 5)
    assert written(again) == [("loss/train", 1, 1.0), ("loss/train", 5, 5.0)]
    TensorBoard(tmp_path).set_state(state)  # the second process's file is not the checkpoint's
    assert written(again) == [("loss/train", 1, 1.0)]


def test_options_are_a_table(board):
    board.show_options({"epochs": 3, "dataset": "a|b", "none": None})
    ((tag, at, text),) = written(board)
    assert (tag, at) == ("options", 0)
    table = html.unescape(plugin_util.markdown_to_safe_html(text))
    cells = re.findall(r"<t[hd]>(.*?)</t[hd]>", table)
    assert cells == ["option", "value", "epochs", "3", "dataset", "a|b"]


def test_training_and_validation_are_in_one_chart(board):
    """As the page Custom Scalars reads it."""
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata

    board.show_charts(["loss", "f1"])
    ((tag, _, content),) = written(board)
    assert tag == metadata.CONFIG_SUMMARY_TAG
    (category,) = layout_pb2.Layout.FromString(content).category
    assert [chart.title for chart in category.chart] == ["loss", "f1"]
    (pattern,) = category.chart[0].multiline.tag
    tags = ["loss/train", "loss/validation", "loss/test", "f1/train", "head_loss/train"]
    assert [tag for tag in tags if re.match(pattern, tag)] == tags[:3]


def test_hparams_are_shown_as_they_were_given(board):
    board.show_hparams(7, {"epochs": 3, "rate": 0.5, "quiet": True, "none": None})
    board.flush()
    (path,) = board.folder.iterdir()
    events = map(
        tf.compat.v1.Event.FromString, tf.data.TFRecordDataset(str(path)).as_numpy_iterator()
    )
    content = b"".join(v.metadata.plugin_data.content for e in events for v in e.summary.value)
    assert b"epochs\x12\x03\x1a\x013" in content  # the text "3", not the number 3.0000
    assert b"rate\x12\t\x11" in content and b"none" not in content


def test_a_full_disk_is_not_taken_for_memory(board, tmp_path, monkeypatch):
    def full(path):
        node = "{{function_node __wrapped__CreateSummaryFileWriter_device_/job:localhost/CPU:0}}"
        flushed = "\n\tFailed to flush 1 events"
        text = f"{node} {path}/{'x' * 200}; No space left on device{flushed}"
        raise tf.errors.ResourceExhaustedError(None, None, text)

    monkeypatch.setattr(tf.summary, "create_file_writer", full)
    words = f"^TensorBoard's files in {tmp_path} cannot be written: No space left on device$"
    with pytest.raises(CannotSave, match=words):
        step(board, 1)


def test_a_worker_that_is_not_the_chief_writes_nothing():
    board = TensorBoard(None)
    step(board, 1)
    with board.writing(3):
        tf.summary.scalar("x", 1.0)
    board.set_state({"files": {"x": 5}})
    assert board.get_state()["files"] == {}


@pytest.mark.parametrize(
    "text", ["it's a film", '"so" & <b>so</b>', "a|b *c* `d` _e_ #1 [f](g) \\ ~h~", "- i", "1 + 1"]
)
def test_tensorboard_shows_a_text_as_it_is(text):
    shown = plugin_util.markdown_to_safe_html(escape(text))
    assert html.unescape(re.fullmatch("<p>(.*)</p>", shown)[1]) == text
    assert "|" not in escape(text) and "\n" not in escape(f"{text}\n")
