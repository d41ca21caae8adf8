"""Training recipes: one file, one story. Keras runs on TensorFlow here."""

import os

from distribution.quiet_start import import_tqdm, keep_tensorflow_quiet
from training import early_answers

os.environ["KERAS_BACKEND"] = "tensorflow"
keep_tensorflow_quiet()
if (program := early_answers.started_as()) is not None:
    early_answers.answer(program, f"python -m recipes.{program}")
import_tqdm()
