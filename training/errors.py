"""Errors that a person can repair; each message is for that person."""


class OptionsError(Exception):
    """Options that are wrong or do not go together; the message has a line for each problem."""


class RunError(Exception):
    """A run's folder cannot be used as it is; one line, exit status 2."""
