"""Where keys and values of running requests live."""
