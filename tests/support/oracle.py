"""The custom training loop of TensorFlow's tutorials, which `fit()` is compared with.

    python tests/support/oracle.py RUN,RUN,... OUTPUT_FOLDER REPLICAS

Per-example losses, `tf.nn.compute_average_loss`, a sum over the replicas. It shares the recipe's
options, data and `build_model`, and nothing of what distributes: no `fit()`, no loss, optimizer
order or callback of ours. Writes the weights after 20 steps to OUTPUT_FOLDER/RUN.npz.
"""

import sys
from pathlib import Path

import strategy_run
import tensorflow as tf


def train(strategy, model, optimizer, dataset, steps, rate, example_losses, weigh):
    """Trains; `example_losses(y, prediction, weights)` gives a sum of weighted losses an example.

    `weigh(weights)` gives the integer that the global batch's sum of losses is divided by.
    """
    iterator = iter(strategy.experimental_distribute_dataset(dataset))

    def replica_step(data, total):
        x, y, weights = data
        with tf.GradientTape() as tape:
            losses = example_losses(y, model(x, training=True), weights)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=total)
            if model.losses:
                loss += tf.nn.scale_regularization_loss(tf.add_n(model.losses))
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        # tf.keras added up the gradients of an embedding's row in its optimizers; Keras 3 does not.
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step(data):
        sums = strategy.run(lambda d: weigh(d[2]), args=(data,))
        total = strategy.reduce(tf.distribute.ReduceOp.SUM, sums, axis=None)
        losses = strategy.run(replica_step, args=(data, total))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    with strategy.scope():
        optimizer.build(model.trainable_variables)
    losses = []
    for number in range(steps):
        optimizer.learning_rate.assign(rate(number))
        losses.append(float(step(next(iterator))))
    return losses


def bert(options, strategy):
    import keras

    from data import masked_lm, text
    from recipes import bert_mlm, presets

    source = text.load_text(options.dataset, options.cache_dir)
    tokenizer = presets.make_tokenizer(options, None, source, options.cache_dir)
    sequences, masking = bert_mlm.make_sequences(options, source, tokenizer, options.cache_dir)
    dataset = masked_lm.training_data(sequences["train"], masking, options.global_batch_size)
    with strategy.scope():
        model = bert_mlm.build_model(options, len(tokenizer.vocabulary), None)
        optimizer = keras.optimizers.AdamW(
            0.0, weight_decay=options.weight_decay, beta_1=options.beta_1, beta_2=options.beta_2
        )
        optimizer.exclude_from_weight_decay(
            var_list=[
                v
                for v in model.trainable_variables
                if v.name in ("bias", "output_bias", "gamma", "beta")
            ]
        )

    def example_losses(labels, logits, weights):
        slots = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        return tf.reduce_sum(slots * tf.cast(weights, slots.dtype), axis=1)

    def filled(weights):
        return tf.cast(tf.reduce_sum(weights), tf.int32)

    steps, peak, warmup = options.max_steps, options.base_learning_rate, options.warmup_steps

    def rate(number):
        if number < warmup:
            return peak * (number + 1) / warmup
        return peak * (1 - (number - warmup) / (steps - warmup))

    losses = train(strategy, model, optimizer, dataset, steps, rate, example_losses, filled)
    return model, losses


def mnist(options, strategy):
    import keras

    from data import batches, images
    from recipes import mnist as recipe

    pixels, labels = images.load_images(options.dataset, options.cache_dir).splits["train"]
    dataset = batches.training_batches(
        len(labels), options.global_batch_size, options.seed, recipe.gather_from(pixels, labels)
    )
    with strategy.scope():
        model = recipe.build_model(options)
        optimizer = keras.optimizers.Adam(0.0)
    assert model.losses, "the oracle's L2 penalty"

    def example_losses(y, logits, weights):
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
        return losses * tf.cast(weights, losses.dtype)

    def rate(number):
        return options.base_learning_rate * (1 - number / options.max_steps)

    steps = options.max_steps
    losses = train(strategy, model, optimizer, dataset, steps, rate, example_losses, _examples)
    return model, losses


def dna(options, strategy):
    import keras
    import numpy as np

    from data import batches, oligos
    from recipes import dna_melting as recipe

    ids, temperatures = oligos.load_oligos(options.dataset, options.seed, options.oligos).splits[
        "train"
    ]
    dataset = batches.training_batches(
        len(ids), options.global_batch_size, options.seed, recipe.gather_from(ids, temperatures)
    )
    mean, deviation = (float(f(temperatures, dtype=np.float64)) for f in (np.mean, np.std))
    with strategy.scope():
        model = recipe.build_model(options, mean, deviation)
        optimizer = keras.optimizers.Adam(0.0, beta_1=0.9, beta_2=0.98, epsilon=1e-9)

    def example_losses(y, prediction, weights):
        error = tf.abs(tf.reshape(y, [-1]) - tf.reshape(prediction, [-1]))
        losses = tf.where(error <= 1.0, 0.5 * error**2, error - 0.5)  # Huber, delta 1
        return losses * tf.cast(tf.reshape(weights, [-1]), losses.dtype)

    def rate(number):
        warmup = options.warmup_steps
        peaks_share = min((number + 1) ** -0.5, (number + 1) * warmup**-1.5) * warmup**0.5
        return options.base_learning_rate * peaks_share

    steps = options.max_steps
    losses = train(strategy, model, optimizer, dataset, steps, rate, example_losses, _examples)
    return model, losses


def _examples(weights):
    return tf.cast(tf.reduce_sum(weights), tf.int32)


def main(names: list[str], output: Path, replicas: int) -> None:
    import importlib

    import numpy as np

    from recipes import run as runs

    output.mkdir(parents=True, exist_ok=True)
    for name in names:
        module, values = strategy_run.RUNS[name]
        recipe = importlib.import_module(f"recipes.{module}")
        options = recipe.Options(
            **values,
            **strategy_run.data_options(module, output.parent),
            cache_dir=output.parent / "cache",
            strategy="mirrored",
            replicas=replicas,
        )
        strategy = runs.prepare(options)
        model, losses = globals()[module.split("_")[0]](options, strategy)
        weights = {v.path: v.value.numpy() for v in model.trainable_variables}
        np.savez(output / f"{name}.npz", losses=np.array(losses), **weights)


if __name__ == "__main__":
    main(sys.argv[1].split(","), Path(sys.argv[2]), int(sys.argv[3]))
