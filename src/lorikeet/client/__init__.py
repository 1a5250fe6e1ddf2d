"""The API process's side of the message channel: token streams, engine supervision, restarts. Never imports torch."""
