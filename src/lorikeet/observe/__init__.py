"""What a server reports about itself: metrics, statistics, request records, the request log, traces, forecasts."""
