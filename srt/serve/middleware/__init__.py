"""What every request passes before it reaches an API."""
