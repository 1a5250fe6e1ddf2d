"""Observes a server: metrics, statistics, request records, the request log, traces and forecasts."""
