"""Runs recipes, ours and yours: options, plan, callbacks, run folder, results."""
