"""Training recipes: one file, one story. Keras runs on TensorFlow here."""

import os

from distribution.quiet_start import import_tensorflow, import_tqdm

os.environ["KERAS_BACKEND"] = "tensorflow"
import_tensorflow()
import_tqdm()
