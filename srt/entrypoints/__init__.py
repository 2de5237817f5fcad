"""What users call: the engine and the command line."""
