"""Initial weights of a small BERT: heads with an eye on a neighbour, word counts.

With BERT's small random weights attention begins uniform, and a small model on little text stays a
bag of words for thousands of steps before a head finds the word beside it. Here each head begins
with its eye on one place: the word before, the word after, two before, and so on. All of it is
trained from there.
"""

import keras
import numpy as np

OFFSETS = (-1, 1, -2, 2, -3, 3, -4, 4)  # by head, layer after layer
BERTS = 0.02  # the standard deviation of BERT's initial weights
SHARPNESS = 1.5  # of queries and keys: how much a head prefers its place to the others
POSITIONS = 2.0 * BERTS  # that of the position embeddings: above that of the word pieces


def look_at_neighbours(model, seed: int) -> None:
    """Sets position embeddings and kernels of a new `BertMaskedLM`.

    Positions are sinusoids, p(t) = (cos wt, sin wt), as in "Attention Is All You Need" (arXiv
    1706.03762), but with frequencies w drawn uniformly from (0, pi), so that the product p(t) p(s)
    is large at t = s alone (random Fourier features, Rahimi and Recht, 2007). The heads of a layer
    share out the frequencies: a head's key reads p(s), and its query p(t + offset), which is p(t)
    rotated by w offset. Kernels are scaled to a variance of one over their inputs ("Efficient
    BackProp", LeCun et al., 1998), so that what a head finds is heard.

    Args:
        model: a `keras_nlp.models.BertMaskedLM` as Keras initialises it.
        seed: decides the frequencies.
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
        query_value, key_value = (BERTS * keras.ops.convert_to_numpy(w) for w in (query, key))
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


def begin_at_unigram(model, log_frequency: np.ndarray) -> None:
    """Sets the output bias of a new `BertMaskedLM`: it begins as the unigram model.

    Its first predictions are then the word pieces' shares in the training text, which it would
    otherwise spend some hundred steps to learn.

    Args:
        model: a `keras_nlp.models.BertMaskedLM` as Keras initialises it.
        log_frequency: logarithms of the pieces' shares, float of shape (vocabulary size,).
    """
    bias = next(w for w in model.trainable_variables if w.path.endswith("output_bias"))
    bias.assign(log_frequency)


def begin_as_bag_of_words(model) -> None:
    """Scales the kernels of a new BERT, and lets its last layer's heads look at all words alike.

    With BERT's small random weights the pooled [CLS] of a small model hardly depends on the words.
    Kernels are scaled to a variance of one over their inputs ("Efficient BackProp", LeCun et al.,
    1998); queries of zero make attention a mean over the sentence. All of it is trained from there.

    Args:
        model: a new model with a `keras_nlp.models.BertBackbone` as its `backbone`.
    """
    _scale_kernels(model.backbone)
    last = model.backbone.num_layers - 1
    for weight in model.backbone.trainable_variables:
        if weight.path.endswith(f"transformer_layer_{last}/self_attention_layer/query/kernel"):
            weight.assign(np.zeros(weight.shape))


def _scale_kernels(model) -> None:
    for weight in model.trainable_variables:
        if weight.path.endswith("/kernel"):
            inputs = weight.shape[:2] if "attention_output" in weight.path else weight.shape[:1]
            weight.assign(keras.ops.convert_to_numpy(weight) / (BERTS * np.sqrt(np.prod(inputs))))
