"""One forward pass: eager, recorded or compiled."""
