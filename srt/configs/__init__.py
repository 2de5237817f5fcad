"""What a checkpoint's configuration files say, checked and typed."""
