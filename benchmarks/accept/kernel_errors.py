"""A pytest plugin: more random examples for every hypothesis test, and the worst ratios of errors in a file at the end.

``python -m pytest -p benchmarks.accept.kernel_errors tests/kernels`` with ``EXAMPLES_TIMES`` (how many times the
examples that a test asks for, drawn anew instead of always the same) and ``ERRORS_FILE`` (JSON: kernel → ratio).
"""

import json
import os
from pathlib import Path

import hypothesis
import pytest

_SETTINGS = "_hypothesis_internal_use_settings"
"""Where hypothesis keeps the settings of a decorated function; a profile would not change what a test asks for."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Raise the number of examples, once for each test function."""
    times = int(os.environ["EXAMPLES_TIMES"])
    functions = {item.function for item in items if isinstance(item, pytest.Function)}
    for function in functions:
        asked = getattr(function, _SETTINGS, None)
        if asked is not None:
            examples = times * asked.max_examples
            more = hypothesis.settings(asked, max_examples=examples, derandomize=False, database=None, deadline=None)
            setattr(function, _SETTINGS, more)


def pytest_sessionfinish() -> None:
    """Write what ``tests.kernels.exactness`` has seen."""
    from tests.kernels.exactness import WORST

    Path(os.environ["ERRORS_FILE"]).write_text(json.dumps(WORST))
