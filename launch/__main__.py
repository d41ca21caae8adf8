"""Starts a recipe in several processes: `python -m launch`."""

import sys

from launch.processes import main

if __name__ == "__main__":
    sys.exit(main())
