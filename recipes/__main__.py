"""Lists the recipes and programs of this package: `python -m recipes`."""

import argparse

from machine.output import silent_broken_pipe
from training.command_line import programs

if __name__ == "__main__":
    listed = [f"  recipes.{name:24}{line}" for name, line in programs().items()]
    parser = argparse.ArgumentParser(
        prog="python -m recipes",
        description="Start one of these with python -m; --help lists its options:\n\n"
        + "\n".join(listed)
        + "\n  launch                          Start a recipe in several processes"
        "\n  launch.on_ray                   Start a recipe on a Ray cluster"
        "\n  launch.doctor                   Check this machine's devices",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    with silent_broken_pipe():
        parser.parse_args()
        parser.print_help()
