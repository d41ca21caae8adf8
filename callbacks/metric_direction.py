"""Decides which way a metric improves; used by `--keep-best`, early stopping and the verdict."""

import keras

from distribution.keras_compat import inspection

MAX = {"acc", "accuracy", "auc", "f1", "precision", "recall", "sensitivity", "specificity"}
MAX |= {"r2", "iou", "dice", "matthews", "pearson", "spearman", "bleu", "match"}
MAX |= {"rouge1", "rouge2", "rougel"}
MIN = {"loss", "error", "entropy", "crossentropy", "perplexity", "divergence", "huber", "hinge"}
MIN |= {"rmse", "mse", "mae", "mape", "msle", "poisson", "logcosh"}


def direction(name: str, model: keras.Model | None = None, mode: str = "auto") -> str | None:
    """Returns whether a metric should be small ("min") or large ("max").

    Args:
        name: the metric's name, with or without `val_`.
        model: compiled with the metric: Keras marks the direction of its own metrics. For other
            metrics the last known word of the name decides: `val_accuracy_loss` is a loss.
        mode: "min" or "max" is returned as it is; "auto" decides.

    Returns:
        "min", "max", or None if it is unknown.
    """
    if mode in ("min", "max"):
        return mode
    name = name.removeprefix("val_")
    marked = model and inspection.metric_direction(model, name)
    if marked:
        return marked
    for word in reversed(name.lower().replace("io_u", "iou").split("_")):
        if word in MIN | MAX:
            return "min" if word in MIN else "max"
    return None
