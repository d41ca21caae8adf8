"""Held against products of matrices that are counted by hand."""

import types

from models import operations


def test_operations_of_an_example():
    """2 layers of width 128, 128 tokens, 19 predictions of 1,000 pieces."""
    token = 2 * (4 * 128**2 + 8 * 128**2 + 2 * 128 * 128)
    prediction = 128**2 + 128 * 1000
    backbone = types.SimpleNamespace(
        num_layers=2, hidden_dim=128, intermediate_dim=512, vocabulary_size=1000
    )
    model = types.SimpleNamespace(backbone=backbone)
    masking = types.SimpleNamespace(max_predictions=19)
    counted = operations.of_masked_lm(model, masking, 128)
    assert counted == 6 * (128 * token + 19 * prediction)
