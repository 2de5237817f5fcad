"""A conversation in the terminal: what `srt chat` runs."""
