"""`srt bench`: how fast a checkpoint generates here, next to the memory's limit and to peers."""
