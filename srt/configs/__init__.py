"""What an engine is told, and what is made of the configuration of a model."""
