"""Training recipes: one file, one story. Keras runs on TensorFlow here."""

import os
import re
import sys

from machine.quiet_start import start_quietly
from training.command_line import answer_early

os.environ["KERAS_BACKEND"] = "tensorflow"
start_quietly()
if sys.argv[:1] == ["-m"]:  # `python -m` is about to import the program that it names
    named = re.fullmatch(r"(?:-\w*m)?recipes\.(\w+)", sys.orig_argv[-len(sys.argv)])
    if named:
        answer_early(named[1])
