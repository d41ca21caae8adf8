"""The one kind of error that a person can repair by other options or another machine."""


class DistributionError(Exception):
    """Strategy, devices, batch sizes or cluster do not go together.

    The message is one line for a person; recipes print it and end with exit status 2.
    """
