"""What all APIs share: from a checked request to the events of its answers."""
