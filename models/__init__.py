"""Builds models: BERTs, causal language models, presets, initial weights, heads, fine-tuning."""
