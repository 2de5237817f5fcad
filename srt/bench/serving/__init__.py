"""How fast a server answers: any that speaks OpenAI's API, several in turns."""
