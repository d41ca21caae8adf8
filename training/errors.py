"""Errors that the user can correct, each message says how; and an exit status of a recipe."""

SAVED_AND_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: the same command resumes


class OptionsError(Exception):
    """Raised for options that are wrong or cannot be combined; one line per problem."""


class RunError(Exception):
    """Raised where a run's folder cannot be used as it is; one line, exit status 2."""


class WorkerLost(Exception):
    """Raised where another worker has ended, without which this one cannot continue."""
