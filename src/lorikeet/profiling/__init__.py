"""Measures the costs of a model on a machine: drives the executor through sweeps of steps and fits a profile."""
