"""How much a training step mathematically has to compute."""


def per_example(
    *,
    num_layers: int,
    hidden_dim: int,
    intermediate_dim: int,
    vocabulary_size: int,
    length: int,
    predictions: int,
) -> int:
    """Floating-point operations that training a BERT on one example mathematically needs.

    A product of (m, k) and (k, n) takes 2 m k n of them. A token takes, in each layer, 4 width^2
    multiplications in the projections of attention, 2 width x inner width in the feed-forward
    layers, 2 length x width in scores and mix; a prediction takes width^2 in the head's dense layer
    and width x vocabulary in the logits. The way back takes twice the way there. What is no matrix
    product is left out (Kaplan et al., arXiv 2001.08361, section 2.1, count alike).

    Args:
        num_layers: Transformer layers.
        hidden_dim: width.
        intermediate_dim: width within the feed-forward layers.
        vocabulary_size: word pieces.
        length: tokens of an example.
        predictions: masked positions that an example has room for.
    """
    attention = 4 * hidden_dim**2 + 2 * length * hidden_dim
    token = num_layers * (attention + 2 * hidden_dim * intermediate_dim)
    prediction = hidden_dim**2 + hidden_dim * vocabulary_size
    return 3 * 2 * (length * token + predictions * prediction)


def of_masked_lm(model, masking, sequence_length: int) -> int:
    """The same of a `BertMaskedLM` and how its examples are masked (`data.masked_lm.Masking`)."""
    backbone = model.backbone
    return per_example(
        num_layers=backbone.num_layers,
        hidden_dim=backbone.hidden_dim,
        intermediate_dim=backbone.intermediate_dim,
        vocabulary_size=backbone.vocabulary_size,
        length=sequence_length,
        predictions=masking.max_predictions,
    )
