"""Errors of adapters, of the adapter store and of the registry."""


class AdapterError(ValueError):
    """An adapter cannot be registered or loaded; the message names the file, tensor or key, and the reason."""


class AdapterStoreError(AdapterError):
    """The store or the registry cannot be read or written (full disk, locked database). The adapter is not at fault."""


class AdapterNotFound(AdapterError):
    """The source, or one of its two files, does not exist."""


class AdapterExists(AdapterError):
    """The name is taken, and ``replace`` is not set."""


class AdapterQuotaExceeded(AdapterError):
    """The owner of the adapter would own too many, or too many bytes of weights."""


class AdapterBusy(AdapterError):
    """Another call is registering or removing the name."""


class UnknownAdapter(AdapterError):
    """No adapter has this name or digest."""


class AdapterNotServed(AdapterError):
    """The adapter is registered, but its files are not in the store, or too large for the dtype of the server."""
