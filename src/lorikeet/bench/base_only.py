"""A peer that is asked for the base model alone."""

from lorikeet.bench.contestants import Contestant, Outcome, Work


class BaseOnly:
    """Runs the same prompts without their adapters.

    Args:
        inner: a peer that was loaded without adapters.
    """

    def __init__(self, inner: Contestant) -> None:
        self._inner = inner
        self.name = f"{inner.name}-base"
        self.versions = inner.versions

    def run(self, work: Work) -> Outcome:
        """Run one batch, greedily, all of it on the base model."""
        return self._inner.run(work._replace(adapters=[None] * len(work.prompts)))

    def close(self) -> None:
        """Release what the peer holds."""
        self._inner.close()
