"""One file per architecture, over the shared layers."""
