"""Running stock vLLM with our heads: what a version needs to be told, and the command."""
