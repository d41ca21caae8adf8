"""Where the work runs: strategies, scaling, launcher, and what Keras lacks for them."""
