"""What a checkpoint says, read from its files and headers without Torch."""
