"""The HTTP server: OpenAI's and Anthropic's APIs over an engine in a process of its own."""
