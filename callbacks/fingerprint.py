"""Keeps in each checkpoint what a resumed run is compared with."""

from callbacks.steps import StepCallback


class Fingerprint(StepCallback):
    """Keeps the shapes of the model's weights, and the checksum of the run's first batch.

    Attributes:
        weights: the shapes, in the model's order.
        first_batch: the checksum, hex, of the first batch of the whole run.
    """

    def __init__(self):
        super().__init__()
        self.weights: list[list[int]] = []
        self.first_batch = ""

    def get_state(self) -> dict:
        """Returns both."""
        return {"weights": self.weights, "first_batch": self.first_batch}

    def set_state(self, state: dict) -> None:
        """Keeps the first batch of the run that resumes."""
        self.first_batch = state["first_batch"]
