"""Runs engines from the API process: token streams, supervision and restarts. Never imports torch."""
