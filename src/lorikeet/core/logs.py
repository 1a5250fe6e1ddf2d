"""Sets up the logs of a process: structlog and the standard ``logging``, as text or JSON lines on stderr."""

import logging
import re
import sys
import threading
from collections.abc import Mapping, MutableMapping
from types import TracebackType
from typing import Any

import structlog

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters except tabs and line feeds, which are shown as they are."""


def configure_logs(level: str, *, as_json: bool) -> None:
    """Set up logging for this process.

    Lines of libraries that use ``logging``, such as uvicorn, get the same form. Only their warnings and errors are
    shown. With ``as_json``, an uncaught exception is also logged as JSON.

    Args:
        level: name of the least severe level that is shown.
        as_json: whether to write one JSON object per line instead of text.

    Raises:
        ValueError: no level has that name.
    """
    names = logging.getLevelNamesMapping()
    number = names.get(level.upper())
    if number is None:
        raise ValueError(f"log level {level!r} is not one of {', '.join(names).lower()}")
    # Tracebacks are plain, since tracebacks of rich show local variables, which may hold keys and prompts.
    console = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
    )
    renderer: Any = structlog.processors.JSONRenderer() if as_json else console
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        _escape_control_characters,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        *([structlog.processors.format_exc_info] if as_json else []),
    ]
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *_: _StderrLogger(),
        cache_logger_on_first_use=False,
    )
    handler = _StderrHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [*(each for each in root.handlers if not isinstance(each, _StderrHandler)), handler]
    root.setLevel(max(number, logging.WARNING))
    logging.getLogger("lorikeet").setLevel(number)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught if as_json else sys.__excepthook__


class _Stderr:
    """Writes lines to the current ``sys.stderr``, which progress bars and tests replace.

    A line that cannot be written (closed pipe, full disk) is dropped and counted, since a failed log line must not fail
    a request. The next line that can be written is followed by a warning with the number of dropped lines.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # A destructor may log during a write.
        self._lost = 0
        self._reason = ""

    def write_line(self, line: str) -> None:
        """Write one line. Never raises."""
        with self._lock:
            try:
                sys.stderr.write(line + "\n")
                sys.stderr.flush()
            except Exception as error:  # A closed file raises ValueError.
                self._lost += 1
                self._reason = str(error)
                return
            lost = self._lost
            self._lost = 0
        if lost:
            structlog.get_logger("lorikeet").warning("log could not be written", lines_lost=lost, reason=self._reason)


_STDERR = _Stderr()


class _StderrLogger:
    """A logger for structlog, which calls the method with the level's name."""

    def msg(self, line: str) -> None:
        """Write one line."""
        _STDERR.write_line(line)

    debug = info = warning = error = critical = log = msg


class _StderrHandler(logging.Handler):
    """A handler for ``logging`` that writes to ``_Stderr``."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        try:
            line = self.format(record)
        except Exception as error:  # The format string is wrong. Without this handler the caller would get the error.
            line = f"log line of {record.pathname}:{record.lineno} cannot be formatted: {error!r}"
        _STDERR.write_line(line)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    structlog.get_logger("lorikeet").critical("uncaught exception", exc_info=(kind, error, trace))


def _escape_control_characters(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """Replace control characters by escapes: paths and names come from clients, and a terminal would obey them."""
    return {
        key: _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", value) if isinstance(value, str) else value
        for key, value in event.items()
    }
