import pytest

from callbacks.steps import StepCallback


class Seen(StepCallback):
    def __init__(self):
        super().__init__()
        self.steps = []

    def on_step_end(self, step, logs):
        self.steps.append((step, [n for n in (2, 3, 5, None) if self.is_due(n)]))


def run(callback, executions, epochs):
    for epoch in range(epochs):
        callback.on_epoch_begin(epoch)
        for batch in executions:
            callback.on_train_batch_end(batch, {})


def test_steps_count_from_1_over_all_epochs():
    callback = Seen().count_steps(3, 6)
    run(callback, [0, 1, 2], 2)
    assert callback.steps == [(1, []), (2, [2]), (3, [3]), (4, [2]), (5, [5]), (6, [2, 3])]


def test_an_execution_of_several_steps_counts_what_lies_in_it():
    callback = Seen().count_steps(6, 12)
    run(callback, [2, 5], 2)
    assert callback.steps == [(3, [2, 3]), (6, [2, 3, 5]), (9, [2, 3]), (12, [2, 3, 5])]


def test_no_step_lies_beyond_the_epoch_or_the_run():
    callback = Seen().count_steps(4, 7)
    run(callback, [2, 5], 2)  # Keras names the batch after the execution's last one
    assert [step for step, _ in callback.steps] == [3, 4, 7, 7]


@pytest.mark.parametrize("step, epoch", [(0, 0), (5, 0), (6, 1), (10, 1)])
def test_a_run_that_resumes_is_in_the_epoch_of_its_last_step(step, epoch):
    callback = Seen().count_steps(5, 10, step)
    assert (callback.step, callback.epoch) == (step, epoch)
