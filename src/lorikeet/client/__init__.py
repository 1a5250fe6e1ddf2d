"""The API process's side of an engine: the channel, streams of tokens, supervision. Never imports torch."""
