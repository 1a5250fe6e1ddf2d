"""Workloads, offline measurements and peers to compare with."""
