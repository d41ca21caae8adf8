"""Code that all recipes share: options, plan, callbacks, run folder, results."""
