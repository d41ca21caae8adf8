"""Text and images in, batches out: plain integers and paths, never a strategy."""
