"""How layers hold and multiply quantized weights."""
