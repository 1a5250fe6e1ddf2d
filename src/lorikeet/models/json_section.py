"""Reads JSON files and checks each value. An error names the file and the key."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class ModelConfigError(ValueError):
    """Raised when a checkpoint cannot be served. The message names file, key and reason."""


class UnsupportedFeature(ModelConfigError):
    """Raised when a checkpoint needs a feature that our decoder does not support."""


class JsonSection:
    """A JSON object whose values are checked when they are read. A null value counts as missing."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    def error(self, key: str, problem: str) -> ModelConfigError:
        """Return an error about ``key``, for the caller to raise."""
        return ModelConfigError(f"{self._where}: {key}: {problem}")

    def unsupported(self, key: str, problem: str) -> "UnsupportedFeature":
        """Return an error about a feature that our decoder does not support, for the caller to raise."""
        return UnsupportedFeature(str(self.error(key, problem)))

    def get(self, key: str, default: Any = None) -> Any:
        """Return the raw value. Null is returned as None, not treated as missing."""
        return self._values.get(key, default)

    def replaced(self, values: Mapping[str, Any]) -> "JsonSection":
        """Return a copy of the section with other values of some keys."""
        return JsonSection({**self._values, **values}, self._where)

    def with_defaults(self, values: Mapping[str, Any]) -> "JsonSection":
        """Return a copy of the section with values for missing keys. Null does not count as missing."""
        return JsonSection({**values, **self._values}, self._where)

    def section(self, key: str) -> "JsonSection | None":
        """Return the object under ``key``, None if missing.

        Raises:
            ModelConfigError: the value is not an object.
        """
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, not {value!r}")
        return JsonSection(value, f"{self._where}: {key}")

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Return an integer of at least ``least``.

        A float without fraction is accepted.

        Raises:
            ModelConfigError: the value is of another kind, or missing without a default.
        """
        number = self.number(key, default)
        if number < least or number != int(number):
            raise self.error(key, f"must be an integer of at least {least}, not {number!r}")
        return int(number)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number.

        Raises:
            ModelConfigError: the value is of another kind, or missing without a default.
        """
        value = self._values.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"must be a number, not {value!r}")
        return value

    def string(self, key: str, default: str) -> str:
        """Return a string.

        Raises:
            ModelConfigError: the value is of another kind.
        """
        value = self._values.get(key)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, not {value!r}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """Return true or false.

        Raises:
            ModelConfigError: the value is of another kind.
        """
        value = self._values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {value!r}")
        return value


def read_json_section(path: Path) -> JsonSection:
    """Read a JSON object.

    Raises:
        ModelConfigError: the file is missing or is not a JSON object.
    """
    return JsonSection(read_json_object(path), str(path))


def read_json_object(path: Path) -> dict[str, Any]:
    """Return a JSON object as plain values.

    Raises:
        ModelConfigError: the file is missing or is not a JSON object.
    """
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(values, dict):
        raise ModelConfigError(f"{path}: must hold a JSON object")
    return values
