"""Start a recipe in several processes, on one machine or on many, and look after them.

    python -m distribution.launch --nproc-per-node 2 -m recipes.bert_mlm --epochs 1

Every process gets a `TF_CONFIG`, a share of the GPUs (without GPUs: of the cores) and a log file.
The launcher itself never imports TensorFlow: it starts at once and holds no memory on a GPU.
`--help` has the options, `docs/many_machines.md` the rest.
"""

import sys

from distribution.launch.options import read_options
from distribution.launch.plan import WRONG_OPTIONS
from distribution.launch.processes import check_logs, say
from distribution.launch.supervision import Launch


def main(argv: list[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments, without the name of the program.

    Returns:
        The exit status.
    """
    plan = read_options(sys.argv[1:] if argv is None else argv)
    problems = check_logs(plan)
    for problem in problems:
        say(problem)
    return WRONG_OPTIONS if problems else Launch(plan).run()


if __name__ == "__main__":
    sys.exit(main())
