"""What is in a checkpoint and whether it would run here."""
