"""Whether a run has beaten what is simpler, and what to try where it has not."""

import dataclasses

from callbacks.metric_direction import direction
from training.plan import FEW_STEPS

# A name as `results.json` has it, in words: the rest is read as it stands.
IN_WORDS = {
    "unigram": "the unigram model",
    "most_frequent": "the most frequent class",
    "tfidf": "TF-IDF with logistic regression",
    "linear": "the linear fit",
    "nearest_neighbour": "the fit on nearest neighbours",
    "mean": "the mean",
}
# Better by less than this is not called better: 0.01 of an accuracy, 1 % of others.
MARGIN = 0.01
LOW_RATE = 1 / 3  # of the recipe's own learning rate
WORSE_AGAIN = 1.02  # a validation loss that has risen by this factor since its best epoch


@dataclasses.dataclass(frozen=True)
class Training:
    """How a run was trained, as far as a verdict depends on it.

    Attributes:
        steps: updates of the weights.
        learning_rate: at the peak.
        usual_learning_rate: what the recipe takes where no option names one, scaled alike.
        history: one list per metric, a number an epoch; validation's begin with `val_`.
    """

    steps: int
    learning_rate: float
    usual_learning_rate: float
    history: dict[str, list[float]]


def verdict(test: dict[str, float], baseline: dict[str, float], training: Training) -> list[str]:
    """Compares the metrics of the test split with those of what is simpler.

    Args:
        test: metrics by name.
        baseline: numbers by name; one that ends in the name of a test metric is compared with it
            (`unigram_cross_entropy` with `cross_entropy`).
        training: how the run was trained.

    Returns:
        Lines for a person: what was beaten, what was not, and then what to try; none where no
        name fits.
    """
    better: dict[str, list[str]] = {}
    others: dict[str, list[str]] = {}
    for name, number in baseline.items():
        metric = next((m for m in sorted(test, key=len, reverse=True) if name.endswith(m)), None)
        if metric is None or direction(metric) is None:
            continue
        sign = 1 if direction(metric) == "max" else -1
        words = name.removesuffix(metric).strip("_")
        words = IN_WORDS.get(words, words.replace("_", " ") or "what is simpler")
        margin = MARGIN * (1 if sign > 0 else abs(number))
        beaten = sign * (test[metric] - number) > margin
        (better if beaten else others).setdefault(words, []).append(metric)
    lines = []
    for begin, found in (("better than", better), ("not better than", others)):
        items = [
            f"{words} in {' and '.join(metrics)}" if words in better and words in others else words
            for words, metrics in found.items()
        ]
        if items:
            lines.append(f"{begin} {', '.join(items)}")
    if others:
        lines.append("try " + "; ".join(advice(training)))
    return lines


def advice(training: Training) -> list[str]:
    """What to try, what is likeliest to help first; at least one thing."""
    found = []
    if training.steps < FEW_STEPS:
        found.append(f"more --epochs or more data: {training.steps} steps teach a model little")
    if training.learning_rate < LOW_RATE * training.usual_learning_rate:
        found.append(
            f"a higher --base-learning-rate: {training.learning_rate:g} at the peak is low, this "
            f"recipe's own would be {training.usual_learning_rate:g}"
        )
    losses = training.history.get("val_loss", [])
    epoch = losses.index(min(losses)) + 1 if losses else 0  # the best one
    if losses and losses[-1] > losses[epoch - 1] * WORSE_AGAIN:
        found.append(
            f"more data or more --dropout: validation was best after epoch {epoch} of "
            f"{len(losses)}, from then on the model learned the training data by heart"
        )
    elif losses and epoch == len(losses) and not found:
        found.append("more --epochs: the validation loss was still falling")
    return found or ["more data, more --epochs, or a larger model"]
