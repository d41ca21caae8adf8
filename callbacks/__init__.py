"""Keras callbacks, one topic per file."""
