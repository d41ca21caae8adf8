"""Training recipes, one per file, and programs that use their runs; Keras runs on TensorFlow."""

import os

from machine.quiet_start import start_quietly
from training.command_line import answer_early

os.environ["KERAS_BACKEND"] = "tensorflow"
start_quietly()
answer_early()
