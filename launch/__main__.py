"""Starts a recipe in several processes: `python -m launch`."""

import sys

from launch.processes import main
from machine.output import silent_broken_pipe

if __name__ == "__main__":
    with silent_broken_pipe():
        sys.exit(main())
