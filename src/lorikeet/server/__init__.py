"""The HTTP side: an OpenAI-compatible API, adapter management, metrics and auth. Never imports torch."""
