"""BERT: presets, initial weights, heads; what a recipe builds with."""
