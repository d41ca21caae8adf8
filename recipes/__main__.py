"""Lists and starts the recipes and programs of this package.

python -m recipes                 lists them
keras-recipes bert_mlm --help     is python -m recipes.bert_mlm --help
"""

import runpy
import sys

from distribution.requirements import version_line
from training.command_line import answer_early, programs, run_as_command
from training.errors import OptionsError


def main() -> None:
    """Lists the programs, or runs the one that the command line names; exits."""
    known = programs()
    name = sys.argv[1].replace("-", "_") if len(sys.argv) > 1 else ""
    if name in known:
        del sys.argv[1]
        answer_early(name)
        runpy.run_module(f"recipes.{name}", run_name="__main__", alter_sys=True)
    run_as_command("recipes", lambda: answer(sys.argv[1:], known))


def answer(words: list[str], known: dict[str, str]) -> None:
    """Prints the programs or the versions.

    Raises:
        OptionsError: the command line names an unknown program.
    """
    if words[:1] == ["--version"]:
        print(version_line())
    elif words and words[0] not in ("--help", "-h"):
        raise OptionsError(f"{words[0]}: unknown program, expected one of {', '.join(known)}")
    else:
        print("usage: python -m recipes.NAME [options]    (--help lists the options)\n")
        for name, line in known.items():
            print(f"  {name:24}{line}")
        print("\n  distribution.launch     Start a recipe in several processes")
        print("  distribution.doctor     Check this machine's devices")


if __name__ == "__main__":
    main()
