"""A recipe as a command: its options parsed, its errors in a line, its exit status."""

import contextlib
import os
import sys
from pathlib import Path

import tensorflow as tf
import tyro

from callbacks.errors import BadLoss, CannotSave, Stopped
from data.errors import DataError
from distribution import cluster
from distribution.errors import DistributionError
from training.errors import OptionsError, RunError
from training.harmless import kept_from_terminal
from training.options import check, flag, from_json
from training.signals import StopRequested

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: the same command resumes


def parse(kind: type, arguments: list[str] | None = None, prog: str | None = None):
    """The options of a command line.

    Args:
        kind: a dataclass, for instance a recipe's `Options`.
        arguments: the command line; the process's own by default.
        prog: the command that `--help` shows.

    Raises:
        OptionsError: values that are wrong, all of them at once.
        SystemExit: `--help`, or a command line that does not parse (status 2).
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    default = kind()
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        following = arguments[index + 1] if index + 1 < len(arguments) else None
        if name.startswith("--") and (value if equals else following) == "":
            raise OptionsError(f"{flag(name.strip('-'))}: is empty, a value is expected")
        if name == "--options":
            default = from_json(kind, Path(value or following or ""))
    description = (sys.modules[kind.__module__].__doc__ or "").strip()
    options = tyro.cli(kind, args=arguments, default=default, description=description, prog=prog)
    check(options)
    return options


def command_line(options_type: type, main) -> None:
    """Runs a recipe's `main` with the options of the command line, and exits.

    Exit status: 0; 2 for what a person can repair, 75 for a run that was stopped and can resume,
    1 for anything else.

    Args:
        options_type: the recipe's `Options`.
        main: the recipe's `main`.
    """
    recipe = sys.modules[options_type.__module__].__spec__.name.split(".")[-1]
    status = 0
    try:
        with kept_from_terminal():
            main(parse(options_type, prog=f"python -m recipes.{recipe}"))
    except (OptionsError, DataError, DistributionError, RunError) as error:
        _say(recipe, error)
        status = 2
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        status = STOPPED
    except StopRequested:
        print("stopped; nothing was trained yet, the same command begins anew", file=sys.stderr)
        status = STOPPED
    except (BadLoss, CannotSave) as error:
        _say(recipe, error)
        status = 1
    except tf.errors.ResourceExhaustedError as error:
        first = str(error.message).splitlines()[0][:200]
        _say(
            recipe,
            f"out of memory: {first}\ntake a smaller --batch-size-per-replica (or "
            "--global-batch-size), with --accumulate-steps for the same update",
        )
        status = 1
    except BrokenPipeError:  # `... | head -1`: nobody reads any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        _say(recipe, error.strerror)  # standard output on a full disk
        status = 1
    _leave(status)


def _say(recipe: str, error) -> None:
    lines = str(error).splitlines() or [type(error).__name__]
    text = "\n".join([f"{recipe}: {lines[0]}", *(f"  {line}" for line in lines[1:])])
    print(text.encode("utf-8", "backslashreplace").decode(), file=sys.stderr)


def _leave(status: int) -> None:
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = status or 1
    with contextlib.suppress(DistributionError):  # a broken TF_CONFIG was reported above
        if cluster.cluster_spec().get("cluster", {}).get("ps"):
            # The coordinator's thread for a worker that died would wait for it, and so the exit.
            sys.stderr.flush()
            os._exit(status)
    sys.exit(status)
