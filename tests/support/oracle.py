"""Trains with the custom loop of TensorFlow's tutorials, as a reference for `fit()`.

    python tests/support/oracle.py RUN,RUN,... OUTPUT_FOLDER REPLICAS

Per-example losses, `tf.nn.compute_average_loss`, a sum over the replicas, `tf.clip_by_global_norm`;
an accumulated step is one batch of all its examples. It shares the recipe's options, data and
`build_model`, but none of the distribution: no `fit()`, strategy, loss, order of a step, schedule
or callback of this package. Writes the last weights to OUTPUT_FOLDER/RUN.weights.h5, and the
losses and the gradients' norms to OUTPUT_FOLDER/RUN.npz.
"""

import sys
from pathlib import Path

import keras
import keras_nlp
import numpy as np
import plain_keras
import strategy_run
import tensorflow as tf

from data import arrays, images, masked_lm, melting, scores, sentences, several_labels, text
from data.batches import training_batches
from models import bert as bert_model
from models import decoders, fine_tuning
from recipes import bert_mlm, causal_lm, dna_melting, mnist, text_classification


def with_weights(data):
    """Examples without weights count once each."""
    x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
    return x, y, tf.ones(tf.shape(y)[:1]) if weights is None else weights


def train(strategy, model, optimizer, dataset, options, example_losses, warmup_steps=0):
    """Trains; returns the loss and the gradient's norm before clipping of each step.

    `example_losses(y, prediction)` gives the losses of examples, or of their predictions. The rate
    rises linearly over `warmup_steps`, by default a tenth of the run, and falls linearly to zero.
    """
    warmup = options.max_steps // 10 if warmup_steps is None else warmup_steps

    def rate(number):
        if number < warmup:
            return options.base_learning_rate * (number + 1) / warmup
        left = 1 - (number - warmup) / (options.max_steps - warmup)
        return options.base_learning_rate * left

    iterator = iter(strategy.experimental_distribute_dataset(dataset))

    def replica_step(data, total):
        x, y, weights = with_weights(data)
        with tf.GradientTape() as tape:
            losses = example_losses(y, model(x, training=True))
            losses *= tf.cast(weights, losses.dtype)
            losses = tf.reshape(losses, [tf.shape(losses)[0], -1])
            losses = tf.reduce_sum(losses, axis=1)  # of an example
            loss = tf.nn.compute_average_loss(losses, global_batch_size=total)
            if model.losses:
                loss += tf.nn.scale_regularization_loss(tf.add_n(model.losses))
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        # tf.keras summed the gradients of an embedding's row in its optimizers; Keras 3 does not.
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        replica = tf.distribute.get_replica_context()
        gradients = replica.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
        norm = tf.linalg.global_norm(gradients)
        if options.clip_norm is not None:
            gradients, _ = tf.clip_by_global_norm(gradients, options.clip_norm)
        # The optimizer sums over the replicas once more.
        gradients = [gradient / strategy.num_replicas_in_sync for gradient in gradients]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss, norm

    @tf.function
    def step(data):
        sums = strategy.run(
            lambda d: tf.cast(tf.reduce_sum(with_weights(d)[2]), tf.int32), args=(data,)
        )
        total = strategy.reduce(tf.distribute.ReduceOp.SUM, sums, axis=None)
        losses, norms = strategy.run(replica_step, args=(data, total))
        return (
            strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None),
            strategy.reduce(tf.distribute.ReduceOp.MEAN, norms, axis=None),
        )

    with strategy.scope():
        optimizer.build(model.trainable_variables)
    seen = []
    for number in range(options.max_steps):
        optimizer.learning_rate.assign(rate(number))
        seen.append([float(value) for value in step(next(iterator))])
    return model, *np.array(seen).T


def batches(options) -> dict:
    return {"batch_size": options.global_batch_size * options.accumulate_steps}


CROSS_ENTROPY = tf.nn.sparse_softmax_cross_entropy_with_logits


def bert(options, strategy):
    source = text.load_text(options.dataset, options.cache_dir)
    tokenizer = bert_model.make_tokenizer(options, None, source, options.cache_dir)
    share = options.initial_probability(None)
    rows, masking = bert_mlm.make_sequences(
        options, source, tokenizer, options.cache_dir, initial_probability=share
    )
    dataset = masked_lm.training_data(
        rows["train"], masking, steps=options.max_steps, **batches(options)
    )
    frequency = masked_lm.log_frequency(rows["train"], masking)
    with strategy.scope():
        model = bert_mlm.build_model(options, len(tokenizer.vocabulary), None, frequency)
        optimizer = adamw(options, model, options.beta_2)
    return train(strategy, model, optimizer, dataset, options, CROSS_ENTROPY, options.warmup_steps)


def causal(options, strategy):
    source = text.load_text(options.dataset, options.cache_dir)
    preprocessor = causal_lm.make_preprocessor(options, None, source, options.cache_dir)
    tokenizer = preprocessor.tokenizer
    rows = causal_lm.make_rows(options, source, tokenizer, True, options.cache_dir)["train"]
    dataset = training_batches(
        len(rows), seed=options.seed, make_batch=rows.make_batch(), **batches(options)
    )
    with strategy.scope():
        task = causal_lm.build_model(options, tokenizer.vocabulary_size())
        states = decoders.apart(task.backbone)
        logits = task.backbone.token_embedding(states.output, reverse=True)
        model = keras.Model(states.input, logits)
        if options.optimizer == "adamw":
            optimizer = adamw(options, task)
        else:
            optimizer = fine_tuning.make_optimizer(options, 0.0, task, default="muon")
    seen = train(strategy, model, optimizer, dataset, options, CROSS_ENTROPY, options.warmup_steps)
    return task, *seen[1:]


def classification(options, strategy):
    data = sentences.load_sentences(options.dataset, options.cache_dir, labels=options.labels)
    texts, labels = data.splits["train"]
    tokenizer = bert_model.make_tokenizer(options, None, data.as_text(), options.cache_dir)
    inputs = sentences.encode(
        texts,
        keras_nlp.models.BertTextClassifierPreprocessor(tokenizer, options.sequence_length),
    )
    share = options.token_dropout or (0.5 if data.kind == "classes" else 0.0)
    dataset = plain_keras.in_full(
        inputs,
        labels,
        seed=options.seed,
        change=sentences.hide_word_pieces(share, tokenizer, options.seed) if share else None,
        **batches(options),
    )
    if data.scores:
        return scores_(options, strategy, inputs, labels, tokenizer, dataset)
    if data.several:
        return several(options, strategy, inputs, labels, tokenizer, dataset)
    with strategy.scope():
        evidence = sentences.naive_bayes_evidence(inputs, labels, tokenizer, len(data.classes))
        model = text_classification.build_model(options, len(data.classes), evidence=evidence)
        optimizer = adamw(options, model)
    return train(strategy, model, optimizer, dataset, options, CROSS_ENTROPY, options.warmup_steps)


def scores_(options, strategy, inputs, labels, tokenizer, dataset):
    """The squared errors of standard scores."""
    mean, deviation = (float(np.float32(value)) for value in (labels.mean(), labels.std()))
    with strategy.scope():
        model = text_classification.build_model(
            options,
            1,
            evidence=scores.evidence(inputs, labels, tokenizer),
            sample=inputs,
            scale=keras.layers.Rescaling(deviation, mean, dtype="float64"),
        )
        optimizer = adamw(options, model)

    def squared_error(y, predicted):
        return tf.square((predicted[:, 0] - y[:, 0]) / deviation)

    return train(strategy, model, optimizer, dataset, options, squared_error, options.warmup_steps)


def several(options, strategy, inputs, labels, tokenizer, dataset):
    """The mean of the labels' cross-entropies."""
    with strategy.scope():
        evidence = several_labels.evidence(inputs, labels, tokenizer)
        model = text_classification.build_model(
            options, labels.shape[1], evidence=evidence, sample=inputs, several=labels
        )
        optimizer = adamw(options, model)

    def cross_entropy(y, logits):
        of_labels = tf.nn.sigmoid_cross_entropy_with_logits(tf.cast(y, logits.dtype), logits)
        return tf.reduce_mean(of_labels, axis=1)

    return train(strategy, model, optimizer, dataset, options, cross_entropy, options.warmup_steps)


def adamw(options, model, beta_2=0.999):
    optimizer = keras.optimizers.AdamW(0.0, weight_decay=options.weight_decay, beta_2=beta_2)
    undecayed = ("bias", "output_bias", "gamma", "beta")
    optimizer.exclude_from_weight_decay(
        var_list=[v for v in model.trainable_variables if v.name in undecayed]
    )
    return optimizer


def mnist_(options, strategy):
    pixels, labels = images.load_images(options.dataset).splits["train"]
    dataset = arrays.training_data(pixels, labels, seed=options.seed, **batches(options))
    with strategy.scope():
        model = mnist.build_model(options)
        optimizer = keras.optimizers.Adam(0.0)
    assert model.losses, "the L2 penalty is to be compared too"
    return train(strategy, model, optimizer, dataset, options, CROSS_ENTROPY)


def dna(options, strategy):
    molecules = melting.load_melting(
        options.dataset, options.cache_dir, seed=options.seed, count=1, fold=options.fold
    )
    width = max(len(melting.columns(m)) for split in molecules.values() for m in split)
    labels = melting.temperatures(molecules["train"])
    inputs = melting.encode(molecules["train"], width)
    dataset = arrays.training_data(
        inputs,
        labels,
        seed=options.seed,
        change=melting.turn_duplexes(options.seed),
        **batches(options),
    )
    mean = float(np.mean(labels, dtype=np.float64))
    with strategy.scope():
        networks = [dna_melting.build_model(options, mean) for _ in range(options.members)]
        model = dna_melting.side_by_side(networks)
        if options.optimizer == "adamw":
            optimizer = adamw(options, model, 0.98)
        else:
            optimizer = fine_tuning.make_optimizer(
                options, 0.0, output_layers=dna_melting.OUTPUT_LAYERS
            )

    def absolute_error(y, predicted):
        return tf.reduce_mean(tf.abs(predicted - y), axis=1)  # of all members

    return train(strategy, model, optimizer, dataset, options, absolute_error, options.warmup_steps)


LOOPS = {
    "bert_mlm": (bert_mlm, bert),
    "mnist": (mnist, mnist_),
    "causal_lm": (causal_lm, causal),
    "dna_melting": (dna_melting, dna),
    "text_classification": (text_classification, classification),
}


def main(names: list[str], output: Path, replicas: int) -> None:
    output.mkdir(parents=True, exist_ok=True)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    [cpu] = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * replicas
    )
    strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])
    for name in names:
        module, values = strategy_run.RUNS[name]
        recipe, loop = LOOPS[module]
        options = recipe.Options(
            **values,
            **strategy_run.data_options(module, output.parent),
            cache_dir=output.parent / "cache",
        )
        keras.utils.set_random_seed(options.seed)
        model, losses, norms = loop(options, strategy)
        model.save_weights(output / f"{name}.weights.h5")
        np.savez(output / f"{name}.npz", losses=losses, norms=norms)


if __name__ == "__main__":
    main(sys.argv[1].split(","), Path(sys.argv[2]), int(sys.argv[3]))
