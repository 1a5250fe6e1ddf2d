"""Chameleon's figures."""
