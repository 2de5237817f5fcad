"""One forward pass: batch metadata, runner and compiled decode."""
