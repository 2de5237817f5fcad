"""From checkpoint files to a model that is ready to run."""
