"""Simulates engines and clusters on a virtual clock, with the scheduling, memory and routing of a live server."""
