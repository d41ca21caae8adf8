from callbacks.options_summary import OptionsSummary
from callbacks.tensorboard import TensorBoard
from tests.support import processes


def begin(folder, options, state=None, step=0):
    board = TensorBoard(folder / "logs")
    summary = OptionsSummary(board, options, {"total_steps": 18})
    if state is not None:
        summary.set_state(state)
    summary.step = step
    summary.on_train_begin()
    board.flush()
    return summary.get_state()


def texts(folder):
    return [(step, value) for _, tag, step, value in processes.events(folder) if tag == "options"]


def test_options_are_shown_once(tmp_path):
    state = begin(tmp_path, {"epochs": 2, "dataset": "a|b"})
    begin(tmp_path, {"epochs": 2, "dataset": "a|b"}, state, step=4)
    ((step, text),) = texts(tmp_path)
    assert step == 0 and b"| epochs | 2 |" in text and b"a&#124;b" in text
    assert b"| total&#95;steps | 18 |" in text


def test_a_run_that_resumes_with_others_shows_them_too(tmp_path):
    state = begin(tmp_path, {"epochs": 2})
    begin(tmp_path, {"epochs": 3}, state, step=4)
    assert [step for step, _ in texts(tmp_path)] == [0, 4]
