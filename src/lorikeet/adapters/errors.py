"""What can be wrong with an adapter, or with what is asked of one."""


class AdapterError(ValueError):
    """An adapter cannot be taken or used; the message names the file, tensor or key and the reason."""


class AdapterStoreError(AdapterError):
    """The store or the registry cannot be read or written: a full disk, a locked database. No adapter is wrong."""


class AdapterNotFound(AdapterError):
    """The source, or one of its two files, does not exist."""


class AdapterExists(AdapterError):
    """The name is taken, and replacing was not asked for."""


class AdapterBusy(AdapterError):
    """The name is being registered or removed by another call at this moment."""


class UnknownAdapter(AdapterError):
    """No adapter has this name or digest."""


class AdapterFilesMissing(AdapterError):
    """The adapter is registered, but its files are no longer in the store."""
