"""Fixtures of tests with grammars."""

from tests.engine.grammar_cases import model, owners

__all__ = ["model", "owners"]
