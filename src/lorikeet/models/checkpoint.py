"""JSON files of a checkpoint folder, read so that every complaint names file and key."""

import json
from pathlib import Path
from typing import Any


class ModelConfigError(ValueError):
    """A checkpoint cannot be served; the message names file and key, and the reason."""


class Settings:
    """A JSON object whose values are checked as they are read. A key that is null counts as missing."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    def error(self, key: str, problem: str) -> ModelConfigError:
        """Return an error about ``key``, to be raised."""
        return ModelConfigError(f"{self._where}: {key}: {problem}")

    def get(self, key: str, default: Any = None) -> Any:
        """Return the raw value; here null is not missing."""
        return self._values.get(key, default)

    def section(self, key: str) -> "Settings | None":
        """Return the object under ``key``, None if missing.

        Raises:
            ModelConfigError: it is not an object.
        """
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, not {value!r}")
        return Settings(value, f"{self._where}: {key}")

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Return an integer from ``least`` on (a whole float counts).

        Raises:
            ModelConfigError: another value, or missing without a default.
        """
        number = self.number(key, default)
        if number < least or number != int(number):
            raise self.error(key, f"must be an integer from {least} on, not {number!r}")
        return int(number)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number.

        Raises:
            ModelConfigError: another value, or missing without a default.
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
            ModelConfigError: another value.
        """
        value = self._values.get(key)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, not {value!r}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """Return true or false.

        Raises:
            ModelConfigError: another value.
        """
        value = self._values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {value!r}")
        return value


def read_settings(path: Path) -> Settings:
    """Read a JSON object.

    Raises:
        ModelConfigError: the file is missing or is not a JSON object.
    """
    return Settings(read_object(path), str(path))


def read_object(path: Path) -> dict[str, Any]:
    """Return a JSON object as plain values; errors as of ``read_settings``."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelConfigError(f"{path}: cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ModelConfigError(f"{path}: must hold a JSON object")
    return values


def read_eos_token_ids(folder: Path, settings: Settings) -> tuple[int, ...]:
    """Return the tokens that end an answer: those of ``generation_config.json``, else those of ``config.json``.

    Raises:
        ModelConfigError: they are not token ids.
    """
    generation = folder / "generation_config.json"
    sources = [read_settings(generation)] if generation.is_file() else []
    for source in [*sources, settings]:
        named = source.get("eos_token_id")
        if named is None:
            continue
        ids = named if isinstance(named, list) else [named]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise source.error("eos_token_id", f"must be token ids, not {named!r}")
        return tuple(ids)
    return ()
