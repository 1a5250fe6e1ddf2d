"""Measuring what a machine and a model cost: the hand-driven executor, the sweeps, and the profile they make."""
