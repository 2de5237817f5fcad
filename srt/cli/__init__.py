"""The command `srt`: one module a command."""
