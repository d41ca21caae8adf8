"""Starts a recipe in several processes, on one machine or many: `python -m distribution.launch`."""
