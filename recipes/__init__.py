"""Training recipes: one file, one story. Keras runs on TensorFlow here."""

import os

from machine.quiet_start import start_quietly
from training.command_line import answer_early

os.environ["KERAS_BACKEND"] = "tensorflow"
start_quietly()
answer_early()
