"""Defines the error that other options or another machine can fix."""


class DistributionError(Exception):
    """Reports an incompatible strategy, devices, batch sizes or cluster.

    The message is one line; recipes print it and end with exit status 2.
    """
