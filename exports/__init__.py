"""A trained model for other programs: what Keras writes, texts in a SavedModel, Hugging Face."""
