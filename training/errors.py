"""Errors that the user can correct; each message says how."""


class OptionsError(Exception):
    """Raised for options that are wrong or cannot be combined; one line per problem."""


class RunError(Exception):
    """Raised where a run's folder cannot be used as it is; one line, exit status 2."""
