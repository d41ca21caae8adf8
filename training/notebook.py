"""Whether this process is the kernel of a notebook, and what a person types there."""

import sys

from training.options import SharedOptions, to_json


def in_notebook() -> bool:
    """Whether this process is a Jupyter kernel."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def call(recipe: str, options: SharedOptions) -> str:
    """The line of Python that runs, or resumes, these options."""
    default = to_json(type(options)())
    words = []
    for name, value in to_json(options).items():
        if value != default[name] and name not in ("options", "resume"):
            words.append(f"{name}={value!r}")
    return f"{recipe}.main({recipe}.Options({', '.join(words)}))"
