"""Exports of trained models: Keras's formats, SavedModels for texts, Hugging Face."""
