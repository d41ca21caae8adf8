"""Distributes training: strategies, clusters, the update, and Keras compatibility."""
