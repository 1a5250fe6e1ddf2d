"""The OpenAI-compatible HTTP API: completions, adapter management, metrics and authentication. Never imports torch."""
