"""Runs workloads in this process and against servers, and summarises the measurements."""
