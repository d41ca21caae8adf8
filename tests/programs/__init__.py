"""Keras programs as a reader of keras.io writes them, each a recipe by the run's lines."""
