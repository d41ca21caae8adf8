"""Shows in TensorBoard what a regression predicts, and how far that is from the truth."""

import numpy as np
import tensorflow as tf

from callbacks import pictures
from callbacks.predictions import Predictions
from callbacks.tensorboard import TensorBoard

SHOWN = 2000  # examples, the first of the split


class RegressionSummaries(Predictions):
    """Draws predicted against true values, and the residuals, each epoch.

    Args:
        tensorboard: where the pictures go, at the step of the run.
        inputs: what the model takes, the examples first; the first 2,000 are shown.
        truth: the true values, float of shape (n, 1).
        unit: of the values, for the axes.
        split: TensorBoard's run.
    """

    def __init__(
        self,
        tensorboard: TensorBoard,
        inputs: np.ndarray,
        truth: np.ndarray,
        unit: str,
        split: str = "test",
    ):
        super().__init__(tensorboard, inputs[:SHOWN], split=split)
        self.truth = np.asarray(truth, np.float64).reshape(-1)[:SHOWN]
        self.unit = unit

    def show(self, outputs):
        """Writes two pictures."""
        predicted = np.asarray(outputs, np.float64).reshape(-1)
        residuals = predicted - self.truth
        rmse = np.sqrt(np.mean(residuals**2))
        scatter = pictures.scatter(
            self.truth,
            predicted,
            titles=(f"true, {self.unit}", f"predicted, {self.unit}"),
            heading=f"step {self.step}: {len(predicted):,} of the {self.split} split, "
            f"RMSE {rmse:.3g} {self.unit}",
            line="diagonal",
        )
        tf.summary.image("predicted_against_true", scatter[np.newaxis])
        scatter = pictures.scatter(
            self.truth,
            residuals,
            titles=(f"true, {self.unit}", f"predicted - true, {self.unit}"),
            heading=f"step {self.step}: residuals, mean {residuals.mean():+.3g} {self.unit}, "
            f"largest {np.abs(residuals).max():.3g} {self.unit}",
            line="zero",
        )
        tf.summary.image("residuals", scatter[np.newaxis])
