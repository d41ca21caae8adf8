"""Training recipes: one file, one story. Keras runs on TensorFlow here."""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"
