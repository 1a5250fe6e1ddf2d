"""What is known of a route between the tiers."""

from lorikeet.core.plan import TransferDone
from lorikeet.memory.transfers import RouteTotals


def test_transfers_that_failed_say_nothing_of_the_time_that_blocks_take() -> None:
    totals = RouteTotals()
    totals.note(4, TransferDone(0, None, 0.2))
    totals.note(1000, TransferDone(1, "no such folder", 0.001))
    assert totals == RouteTotals(transfers=2, blocks=4, failed=1, busy_s=0.2)
