"""Lists the recipes and programs of this package: `python -m recipes`."""

import argparse
import difflib
import shlex
import sys
from pathlib import Path

from machine.output import silent_broken_pipe
from training.command_line import programs

LAUNCHERS = {
    "launch": "Start a recipe in several processes",
    "launch.on_ray": "Start a recipe on a Ray cluster",
    "launch.doctor": "Check this machine's devices",
}


def how_to_start(name: str, arguments: list[str]) -> str:
    """Returns the command that starts a program of this package, for a message.

    Args:
        name: of a program, perhaps mistyped, or of its file.
        arguments: those of the program.
    """
    modules = {each: f"recipes.{each}" for each in programs()} | {each: each for each in LAUNCHERS}
    stem = (Path(name).stem if name.endswith(".py") else name).removeprefix("recipes.")
    near = difflib.get_close_matches(stem.replace("-", "_"), modules, n=1)
    if not near:
        return f"{name}: no such program; python -m recipes lists them"
    command = shlex.join(["python", "-m", modules[near[0]], *arguments])
    return f"{name}: a program is started by its module: {command}"


def main() -> None:
    """Prints the list, or how to start a program that is named."""
    programs_here = {f"recipes.{name}": line for name, line in programs().items()}
    listed = [f"  {name:32}{line}" for name, line in (programs_here | LAUNCHERS).items()]
    parser = argparse.ArgumentParser(
        prog="python -m recipes",
        description="Start one of these with python -m; --help lists its options:\n\n"
        + "\n".join(listed),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    name = sys.argv[1] if len(sys.argv) > 1 else "-"
    if not name.startswith("-"):
        parser.error(how_to_start(name, sys.argv[2:]))
    parser.parse_args()
    parser.print_help()


if __name__ == "__main__":
    with silent_broken_pipe():
        main()
