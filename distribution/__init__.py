"""Where the work runs: strategies, clusters, the update, and what Keras lacks for them."""
