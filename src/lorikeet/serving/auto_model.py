"""Chooses the adapter of requests whose ``model`` is ``auto``, by the examples of the adapters' folders."""

from collections import OrderedDict
from functools import partial

from lorikeet.adapters.catalog import AdapterCatalog
from lorikeet.adapters.errors import AdapterNotServed
from lorikeet.chat.mixtures import PREFIX
from lorikeet.chat.nearest_examples import Nearest, NearestExamples
from lorikeet.http.threads import in_daemon_thread, off_the_loop
from lorikeet.tenants.keys import Access, KeySettings

_MOST_KEYS = 64
"""Keys whose examples are kept ready for searches."""


class AutoModel:
    """Finds the adapter whose examples are nearest to a prompt, among those that the sender may use.

    Each key has its own examples, so that an adapter which a key may not use has no influence on its choices.

    Args:
        catalog: the registered adapters.
        is_enabled: whether requests may leave the choice to the server.

    Attributes:
        is_enabled: as the argument.
    """

    def __init__(self, catalog: AdapterCatalog, *, is_enabled: bool) -> None:
        self.is_enabled = is_enabled
        self._catalog = catalog
        self._examples = OrderedDict[str, tuple[int, KeySettings | None, NearestExamples]]()

    async def choose(self, prompt: str, access: Access) -> Nearest:
        """Return the nearest adapter that a sender may use."""
        examples = await self._of(access)
        return await off_the_loop(partial(examples.nearest, prompt), len(prompt))

    async def _of(self, access: Access) -> NearestExamples:
        key_id = "" if access.key is None else access.key.key_id
        settings = None if access.key is None else access.key.settings
        changes = self._catalog.changes
        if (kept := self._examples.get(key_id)) is None or kept[:2] != (changes, settings):
            examples = await in_daemon_thread(partial(self._read, access))
            kept = self._examples[key_id] = (changes, settings, examples)
        self._examples.move_to_end(key_id)
        while len(self._examples) > _MOST_KEYS:
            self._examples.popitem(last=False)
        return kept[2]

    def _read(self, access: Access) -> NearestExamples:
        """Read the examples of the adapters that a sender may use and that can be served."""
        return NearestExamples(
            {
                record.name: record.chat.examples
                for record in self._catalog.list()
                if access.may_use(record.name)
                and not record.name.startswith(PREFIX)
                and record.chat.examples
                and self._is_served(record.name)
            }
        )

    def _is_served(self, name: str) -> bool:
        try:
            return self._catalog.get(name) is not None
        except AdapterNotServed:
            return False
