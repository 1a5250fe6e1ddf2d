"""Tests of ``lorikeet.adapters``."""
