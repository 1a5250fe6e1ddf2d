"""Implements Chameleon: an adapter cache, and a multi-level queue by request size."""
