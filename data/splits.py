"""The splits of a dataset, by the names that every module uses."""

SPLITS = ("train", "valid", "test")
