"""Errors of adapters, of the adapter store and of the registry."""


class AdapterError(ValueError):
    """Raised when an adapter cannot be registered or loaded.

    The message names the file, tensor or key, and the reason.
    """


class AdapterStoreError(AdapterError):
    """Raised when the store or the registry cannot be read or written (full disk, locked database)."""


class AdapterNotFound(AdapterError):
    """Raised when the source, or one of its two files, does not exist."""


class AdapterExists(AdapterError):
    """Raised when the name is taken, and ``replace`` is not set."""


class AdapterQuotaExceeded(AdapterError):
    """Raised when the owner would own too many adapters, or too many bytes of weights."""


class AdapterBusy(AdapterError):
    """Raised when another call is registering or removing the name."""


class UnknownAdapter(AdapterError):
    """Raised when no adapter has this name or digest."""


class AdapterNotServed(AdapterError):
    """Raised when the adapter is registered, but its files are missing, or its weights overflow the server's dtype."""
