"""Asking OpenAI-compatible servers: what they say of themselves, and streams of their answers."""
