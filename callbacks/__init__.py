"""Keras callbacks, one a file."""
