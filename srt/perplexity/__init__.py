"""How well a model predicts a text."""
