"""Initialises a small BERT with local-attention heads and counts of words.

With BERT's small random weights attention starts uniform, and a small model on little text stays a
bag of words for thousands of steps before a head attends to a neighbouring word. With these weights
each head starts by attending to one relative position: one before, one after, two before, and so
on. All of it is trained.
"""

import math
from collections.abc import Iterator

import keras
import keras_nlp
import numpy as np

from data.live_line import Waiting, live_line
from distribution.keras_compat import hub_models

OFFSETS = (-1, 1, -2, 2, -3, 3, -4, 4)  # by head, layer after layer
BERT_STDDEV = 0.02  # the standard deviation of BERT's initial weights
SHARPNESS = 1.5  # of queries and keys: how much a head prefers its position to the others
CONFIDENCE = 20.0  # weight of a class's column in the logits
EVIDENCE = 0.1  # scale of naive Bayes evidence; a segment's vector has 10 BERT_STDDEV
MEAN = 4.0  # weight of the mean over the tokens relative to [CLS]
PROBE = 0.005  # strength of a logistic regression on standardised features, 1 / its penalty
MOST_PROBED_CLASSES = 1000  # half a minute
MOST_PROBED = 2000  # training sentences of such a regression
PROBED_AT_ONCE = 50
POSITIONS = 2.0 * BERT_STDDEV  # of the position embeddings: above that of the word pieces


def init_local_attention(model, seed: int) -> None:
    """Sets position embeddings and kernels of a new `BertMaskedLM`.

    Positions are sinusoids, p(t) = (cos wt, sin wt), as in "Attention Is All You Need" (arXiv
    1706.03762), but with frequencies w drawn uniformly from (0, pi), so that the product p(t) p(s)
    is large at t = s alone (random Fourier features, Rahimi and Recht, 2007). The heads of a layer
    divide the frequencies: a head's key reads p(s), and its query p(t + offset), which is p(t)
    rotated by w offset. Kernels are scaled to a variance of one over their inputs ("Efficient
    BackProp", LeCun et al., 1998), so that the output of a head has an effect.

    Args:
        model: a `keras_nlp.models.BertMaskedLM` as Keras initialises it.
        seed: the seed of the frequencies.
    """
    backbone = model.backbone
    weights = {weight.path: weight for weight in model.trainable_variables}
    _scale_kernels(model)

    positions = weights["position_embedding/embeddings"]
    length, width = positions.shape
    pairs, heads = width // 2, backbone.num_heads
    frequency = np.random.default_rng(seed).uniform(0, np.pi, pairs)
    angle = np.arange(length)[:, np.newaxis] * frequency
    value = np.array(keras.ops.convert_to_numpy(positions))
    value[:, : 2 * pairs] = np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
    value[:, : 2 * pairs] *= POSITIONS * np.sqrt(2)
    positions.assign(value)

    for layer in range(backbone.num_layers):
        attention = f"transformer_layer_{layer}/self_attention_layer"
        query, key = (weights[f"{attention}/{name}/kernel"] for name in ("query", "key"))
        # Shape (width, heads, columns of a head); a pair of columns for each frequency.
        query_value, key_value = (BERT_STDDEV * keras.ops.convert_to_numpy(w) for w in (query, key))
        columns = query_value.shape[2]
        for head in range(heads):
            offset = OFFSETS[(layer * heads + head) % len(OFFSETS)]
            for place, pair in enumerate(range(head, pairs, heads)[: columns // 2]):
                turn, both = offset * frequency[pair], [2 * place, 2 * place + 1]
                cosine, sine = SHARPNESS * np.cos(turn), SHARPNESS * np.sin(turn)
                key_value[pair, head, both] += SHARPNESS, 0
                key_value[pairs + pair, head, both] += 0, SHARPNESS
                query_value[pair, head, both] += cosine, sine
                query_value[pairs + pair, head, both] += -sine, cosine
        query.assign(query_value)
        key.assign(key_value)


def init_unigram_bias(model, log_frequency: np.ndarray) -> None:
    """Initialises the output bias of a new `BertMaskedLM` as a unigram model.

    Its first predictions are then the word pieces' shares in the training text, which would
    otherwise take some hundred steps to learn.

    Args:
        model: a `keras_nlp.models.BertMaskedLM` as Keras initialises it.
        log_frequency: logarithms of the pieces' shares, float of shape (vocabulary size,).
    """
    hub_models.output_bias_of(model.masked_lm_head).assign(log_frequency)


def init_naive_bayes(model, evidence: np.ndarray) -> None:
    """Initialises a new `BertTextClassifier` as a naive Bayes classifier of its training text.

    With BERT's small random weights the pooled [CLS] of a small model hardly depends on the words,
    and on some thousand sentences it memorises them before it generalises. With these weights the
    first columns of a word piece's embedding, one per class, contain the naive Bayes evidence of
    the piece. Queries of zero make [CLS] attend to all words equally, so that it contains the mean
    of their evidence, and the columns are passed to the logits. The other columns are random, with
    kernels scaled to a variance of one over their inputs ("Efficient BackProp", LeCun et al.,
    1998). All of it is trained. Classes without a column in a head start without evidence.

    Args:
        model: a `keras_nlp.models.BertTextClassifier` as Keras initialises it.
        evidence: log-likelihoods of the pieces, less their mean over the classes, float of shape
            (vocabulary size, classes).
    """
    _scale_kernels(model.backbone)
    values = {w.path: np.array(keras.ops.convert_to_numpy(w)) for w in model.trainable_variables}
    columns = min(evidence.shape[1], values["logits/kernel"].shape[0] // model.backbone.num_heads)
    tokens, positions, segments = (
        values[f"{name}_embedding/embeddings"] for name in ("token", "position", "segment")
    )
    tokens[:, :columns] = EVIDENCE * evidence[:, :columns]
    positions[:] = 0.0
    # A vector that is the same for all words makes layer normalisation nearly linear in the others.
    segments[:, :columns] = 0.0
    segments -= segments.mean(axis=1, keepdims=True)
    segments *= 10
    for layer in range(model.backbone.num_layers):
        last = f"transformer_layer_{layer}"
        values[f"{last}/self_attention_layer/attention_output/kernel"][..., :columns] = 0.0
        values[f"{last}/feedforward_output_dense/kernel"][:, :columns] = 0.0
    attention = f"{last}/self_attention_layer"
    values[f"{attention}/query/kernel"][:] = 0.0
    value, output = (values[f"{attention}/{name}/kernel"] for name in ("value", "attention_output"))
    pooled, logits = values["pooled_dense/kernel"], values["logits/kernel"]
    value[:, 0, :columns] = 0.0
    pooled[:, :columns] = 0.0
    logits[:] = 0.0
    for column in range(columns):
        value[column, 0, column] = output[0, column, column] = pooled[column, column] = 1.0
        logits[column, column] = CONFIDENCE
    for weight in model.trainable_variables:
        weight.assign(values[weight.path])


def init_scores(model, evidence: np.ndarray, inputs: dict[str, np.ndarray]) -> None:
    """Initialises a new `BertTextClassifier` of scores as the mean evidence of a sentence's pieces.

    As `init_naive_bayes()`, with one column; the last layer is fitted to the means by least
    squares, since an offset, which classes would share, is an error of every score.

    Args:
        model: a `keras_nlp.models.BertTextClassifier` as Keras initialises it, whose activation is
            a `keras.layers.Rescaling`.
        evidence: of the pieces, in standard scores, float of shape (vocabulary size, 1).
        inputs: its inputs for some hundred sentences.
    """
    init_naive_bayes(model, evidence)
    tokens = inputs["padding_mask"] > 0
    means = (evidence[inputs["token_ids"], 0] * tokens).sum(axis=1) / tokens.sum(axis=1)
    scores = keras.ops.convert_to_numpy(model(inputs, training=False))[:, 0].astype(np.float64)
    answers = (scores - model.activation.offset) / model.activation.scale
    apart, spread = answers - answers.mean(), means - means.mean()
    slope = float(apart @ spread) / max(float(apart @ apart), 1e-12)
    kernel, bias = model.output_dense.weights
    kernel.assign(slope * keras.ops.convert_to_numpy(kernel))
    bias.assign([means.mean() - slope * answers.mean()])


def init_several(
    model,
    evidence: np.ndarray,
    inputs: dict[str, np.ndarray],
    labels: np.ndarray,
    label_weights: np.ndarray | None = None,
) -> None:
    """Initialises a new `BertTextClassifier` of several labels as naive Bayes for each label.

    As `init_naive_bayes()`, without the offsets that classes would share and that decide whether a
    label is predicted: the vectors of the segments have none, and the pooled columns are centred.
    So without any evidence a label is as likely as it is frequent, also where dropout hides it; or
    as likely as its weights in the loss make it.

    Args:
        model: a `keras_nlp.models.BertTextClassifier` as Keras initialises it.
        evidence: of the pieces, half of the log odds, float of shape (vocabulary size, labels).
        inputs: its inputs for some hundred sentences.
        labels: theirs, 0 or 1, of shape (sentences, labels).
        label_weights: of the loss, of the labels that are 0 and of those that are 1, float of shape
            (2, labels); None for ones.
    """
    init_naive_bayes(model, evidence)
    kernel, bias = (np.array(keras.ops.convert_to_numpy(w)) for w in model.output_dense.weights)
    pooled = model.backbone.get_layer("pooled_dense")
    columns = int(np.count_nonzero(kernel))  # the first ones
    segments = model.backbone.get_layer("segment_embedding").embeddings
    vectors = np.array(keras.ops.convert_to_numpy(segments))
    vectors[:, columns:] -= vectors[:, columns:].mean(axis=1, keepdims=True)
    vectors[:, :columns] = 0.0
    segments.assign(vectors)
    outputs = keras.ops.convert_to_numpy(model.backbone(inputs)["pooled_output"])
    offsets = np.array(keras.ops.convert_to_numpy(pooled.bias))
    offsets[:columns] -= np.arctanh(outputs[:, :columns].astype(np.float64)).mean(axis=0)
    pooled.bias.assign(offsets)
    shares = (labels.sum(axis=0) + 0.5) / (len(labels) + 1)
    odds = np.log(shares) - np.log1p(-shares)
    if label_weights is not None:
        odds += np.log(label_weights[1]) - np.log(label_weights[0])
    model.output_dense.set_weights([2 * kernel, odds])


def _constant_logits(labels: np.ndarray) -> np.ndarray:
    """Returns logits of labels that all examples have, or none: as far from 0 as n of them say."""
    return np.where(labels[0] > 0, 1.0, -1.0) * np.log(1 + len(labels))


def add_mean_layer(backbone, inputs: dict[str, np.ndarray]) -> keras_nlp.models.BertBackbone:
    """Returns the backbone with one more layer, in which [CLS] starts as the mean of all tokens.

    Masked language modelling does not train [CLS] to represent its sentence, and neither do few
    labels. The layer's queries are zero, so that each token attends to all equally; its values are
    its inputs; its feed-forward part adds nothing. The pooler standardises the means, since those
    of two sentences hardly differ. All of it is trained.

    Args:
        backbone: a `keras_nlp.models.BertBackbone` with weights; it is not changed.
        inputs: its inputs for some hundred sentences.
    """
    config = backbone.get_config()
    last = f"transformer_layer_{config['num_layers']}"
    config["num_layers"] += 1
    deeper = keras_nlp.models.BertBackbone.from_config(config)
    known = {weight.path: weight for weight in backbone.weights}
    heads, width = backbone.num_heads, backbone.hidden_dim
    identity = np.eye(width)
    new = {
        f"{last}/self_attention_layer/query/kernel": np.zeros((width, heads, width // heads)),
        f"{last}/self_attention_layer/value/kernel": identity.reshape(width, heads, -1),
        f"{last}/self_attention_layer/attention_output/kernel": MEAN
        * identity.reshape(heads, -1, width),
        f"{last}/feedforward_output_dense/kernel": np.zeros((config["intermediate_dim"], width)),
    }
    for weight in deeper.weights:
        if weight.path in new:
            weight.assign(new[weight.path])
        elif weight.path in known:
            weight.assign(known[weight.path])
    features = keras.ops.convert_to_numpy(deeper(inputs)["sequence_output"])[:, 0]
    scale = 0.5 / (features.std(axis=0) + 1e-3)  # where tanh is nearly linear
    deeper.get_layer("pooled_dense").set_weights([np.diag(scale), -scale * features.mean(axis=0)])
    return deeper


def init_probe(
    model,
    inputs: dict[str, np.ndarray],
    labels: np.ndarray,
    weights: dict[int, float] | np.ndarray | None = None,
) -> None:
    """Initialises the last layer of a classifier as a regression on its inputs, a linear probe.

    Over a frozen encoder little else is learned, and an optimizer needs hundreds of steps to find
    what a regression finds at once: logistic for classes, ridge for scores, whose penalty is the
    best of leaving one sentence out. It learns from standardised inputs; the weights take them as
    they are. A class without an example begins as unlikely as one in all of them. Each of several
    labels has a regression. Does nothing if all examples are of one class, or if there are more
    than `MOST_PROBED_CLASSES`.

    Args:
        model: a `keras_nlp.models.TextClassifier`; of scores if its activation is a
            `keras.layers.Rescaling`.
        inputs: its inputs for the training sentences, of which at most `MOST_PROBED` are used.
        labels: classes, of shape (sentences,); scores, (sentences, 1); or several labels, 0 or 1,
            (sentences, labels).
        weights: of the loss, by class; or of several labels, of those that are 0 and of those that
            are 1, float of shape (2, labels).
    """
    from sklearn.linear_model import LogisticRegression, RidgeCV
    from sklearn.preprocessing import StandardScaler

    if len(labels) > MOST_PROBED:  # at random: the classes may alternate
        used = np.random.default_rng(0).choice(len(labels), MOST_PROBED, replace=False)
        inputs, labels = {name: rows[used] for name, rows in inputs.items()}, labels[used]
    present = np.unique(labels)
    is_scores = isinstance(model.activation, keras.layers.Rescaling)
    if len(present) == 1 or (not is_scores and model.num_classes > MOST_PROBED_CLASSES):
        return
    encoder = keras.Model(model.inputs, model.output_dense.input)
    parts = []
    with live_line(what="encoding sentences for the head", total=len(labels)) as bar:
        for start in range(0, len(labels), PROBED_AT_ONCE):
            part = {name: rows[start : start + PROBED_AT_ONCE] for name, rows in inputs.items()}
            features = keras.ops.cast(encoder(part, training=False), "float64")
            parts.append(keras.ops.convert_to_numpy(features))
            bar.update(len(features))
    standard = StandardScaler()
    features = standard.fit_transform(np.concatenate(parts))
    kernel, bias = (np.array(keras.ops.convert_to_numpy(w)) for w in model.output_dense.weights)
    if not is_scores and labels.ndim == 2:
        columns = np.flatnonzero(np.ptp(labels, axis=0))
        kernel[:], bias[:] = 0.0, _constant_logits(labels)
        slopes, offsets = np.zeros((len(columns), features.shape[1])), np.zeros(len(columns))
        with Waiting("fitting the head"):
            for place, column in enumerate(columns):
                logistic = LogisticRegression(C=PROBE, solver="newton-cg", tol=1e-8)
                rows = labels[:, column]
                counted = weights[rows, column] if isinstance(weights, np.ndarray) else None
                logistic.fit(features, rows, counted)
                slopes[place], offsets[place] = logistic.coef_[0], logistic.intercept_[0]
    elif is_scores:
        scale = model.activation
        ridge = RidgeCV(10.0 ** np.arange(6)).fit(features, (labels - scale.offset) / scale.scale)
        columns, slopes, offsets = np.array([0]), ridge.coef_[None], np.array([ridge.intercept_])
    else:
        # L-BFGS, the default, stops early, and where depends on the number of threads.
        logistic = LogisticRegression(C=PROBE, solver="newton-cg", tol=1e-8)
        with Waiting("fitting the head"):
            counted = None if weights is None else [weights[label] for label in labels]
            logistic.fit(features, labels, counted)
        columns, slopes, offsets = present, logistic.coef_, logistic.intercept_
        if len(present) == 2:  # of two classes it has the difference
            slopes, offsets = (np.concatenate([-w, w]) / 2 for w in (slopes, offsets))
        kernel[:] = 0.0
        bias[:] = offsets.min() - np.log(len(labels))
    slopes = slopes / standard.scale_
    kernel[:, columns] = slopes.T
    bias[columns] = offsets - slopes @ standard.mean_
    model.output_dense.set_weights([kernel, bias])


def kernels_with_inputs(model) -> Iterator[tuple[keras.Variable, int]]:
    """Yields the trained kernels of a Transformer, each with the number of its inputs."""
    for weight in model.trainable_variables:
        if weight.path.endswith("/kernel"):
            # Attention's output reads heads and their columns.
            axes = 2 if "attention_output" in weight.path else 1
            yield weight, math.prod(weight.shape[:axes])


def _scale_kernels(model) -> None:
    for kernel, inputs in kernels_with_inputs(model):
        kernel.assign(keras.ops.convert_to_numpy(kernel) / (BERT_STDDEV * np.sqrt(inputs)))
