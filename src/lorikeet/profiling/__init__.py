"""Measures what a machine and a model cost: drives the executor through sweeps of steps and fits a profile."""
