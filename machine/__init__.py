"""Describes and sets up the machine: device, versions, MFU, XLA cache, quiet start."""
