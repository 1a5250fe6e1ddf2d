"""Answers OpenAI's batches in the background: many requests in one file."""
