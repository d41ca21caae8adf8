"""How a run ends early; each message is for a person."""


class Stopped(Exception):
    """The run was asked to stop, and ends after the batch in which it learned of it."""


class CannotSave(Exception):
    """Something of the run could not be written; what was written before is as it was."""


class BadLoss(Exception):
    """A number is not finite; the message names step, learning rate and last good checkpoint."""
