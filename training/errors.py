"""Errors that a person can repair; each message is for that person."""


class OptionsError(Exception):
    """Raised for options that are wrong or cannot be combined; a line for each problem."""


class RunError(Exception):
    """Raised where a run's folder cannot be used as it is; one line, exit status 2."""
