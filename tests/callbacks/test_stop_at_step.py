from callbacks.stop_at_step import StopAtStep


def test_it_ends_at_the_last_step_in_mid_epoch(fake_model):
    callback = StopAtStep().count_steps(steps_per_epoch=4, total_steps=6)
    callback.set_model(fake_model)
    for epoch, batches in ((0, 4), (1, 1)):
        callback.on_epoch_begin(epoch)
        for batch in range(batches):
            callback.on_train_batch_end(batch, {})
            assert not fake_model.stop_training
    callback.on_train_batch_end(1, {})
    assert fake_model.stop_training
