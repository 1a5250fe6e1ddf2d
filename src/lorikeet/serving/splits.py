"""Keeps the names whose requests are split between several adapters."""

import msgspec

from lorikeet.adapters.catalog import AdapterCatalog
from lorikeet.core.splits import Split
from lorikeet.http.logs import log
from lorikeet.tenants.keys import Access


class SplitNames:
    """The splits of this server, and of the others that share its store.

    Args:
        catalog: the catalog, whose registry keeps the splits.
    """

    def __init__(self, catalog: AdapterCatalog) -> None:
        self._catalog = catalog
        self._splits: dict[str, Split] = {}
        self.reload()

    def reload(self) -> None:
        """Read the splits again, which another server may have changed."""
        splits = {}
        for name, text in self._catalog.splits().items():
            try:
                splits[name] = msgspec.json.decode(text, type=Split)
            except msgspec.DecodeError as error:
                log.warning("a split is not used", name=name, error=str(error))
        self._splits = splits

    def get(self, name: str | None) -> Split | None:
        """Return the split of a name, None if there is none."""
        return self._splits.get(name or "")

    def names(self, access: Access) -> list[str]:
        """Return the names that a sender may see, in alphabetical order."""
        return sorted(filter(access.may_see, self._splits))

    def set(self, name: str, split: Split, actor: str) -> None:
        """Add or change a split.

        Raises:
            AdapterStoreError: the registry cannot be written.
        """
        self._catalog.set_split(name, msgspec.json.encode(split).decode(), actor)
        self._splits = {**self._splits, name: split}

    def remove(self, name: str, actor: str) -> None:
        """Remove a split; its adapters stay.

        Raises:
            AdapterStoreError: the registry cannot be written.
        """
        self._catalog.set_split(name, "", actor)
        self._splits = {each: split for each, split in self._splits.items() if each != name}
