"""What the machine is and has: quiet start, kept XLA programs, MFU, installed versions."""
