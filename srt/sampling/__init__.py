"""From logits to token ids, and from token ids to text."""
