"""How transfers go and what that costs, added up by hand."""

import pytest

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, AdapterName, BlockId
from lorikeet.core.plan import Tier, Transfer
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.profile import Constant, Link, ProfileError, Transfers
from lorikeet.costs.transfer_model import LinkDirection, TransferLeg, TransferModel, TransferPath
from tests.support.profiles import GEOMETRY, round_profile

BLOCK_BYTES = GEOMETRY.block_bytes(16)
RANK_8 = AdapterRef(AdapterName("x"), AdapterDigest("digest-x"), "", {"q": (8, 8)}, 0)
"""8 ranks of 64 bytes: one block."""


def transfer(source: Tier, target: Tier, host: int, device: int, adapter: AdapterRef | None = RANK_8) -> Transfer:
    """A transfer of so many blocks of either tier."""
    host_blocks, device_blocks = (tuple(BlockId(i) for i in range(count)) for count in (host, device))
    return Transfer(0, source, target, host_blocks, device_blocks, adapter)


def legs(model: TransferModel, moved: Transfer) -> list[tuple[LinkDirection, float]]:
    return [(leg.direction, pytest.approx(leg.seconds)) for leg in model.path(moved).legs]


@pytest.mark.parametrize(
    ("moved", "expected"),
    [
        (transfer(Tier.SOURCE, Tier.HOST, 1, 0), [(LinkDirection.READ, 0.040)]),
        (transfer(Tier.SOURCE, Tier.DEVICE, 0, 1), [(LinkDirection.READ, 0.050)]),
        (transfer(Tier.SOURCE, Tier.DEVICE, 1, 1), [(LinkDirection.READ, 0.040), (LinkDirection.IN, 0.001)]),
        (transfer(Tier.HOST, Tier.DEVICE, 3, 3, None), [(LinkDirection.IN, 0.003)]),
        (transfer(Tier.DEVICE, Tier.HOST, 3, 3, None), [(LinkDirection.OUT, 0.006)]),
    ],
)
def test_each_route_goes_over_its_links(moved: Transfer, expected: list[tuple[LinkDirection, float]]) -> None:
    assert legs(TransferModel(round_profile(), BLOCK_BYTES), moved) == expected


def test_reads_count_the_bytes_of_weights_and_copies_whole_blocks() -> None:
    links = Transfers(
        source_to_host=Link(Constant(1.0, "s"), Constant(512.0, "bytes/s")),
        host_to_device=Link(Constant(0.5, "s"), Constant(1024.0, "bytes/s")),
    )
    model = TransferModel(round_profile(transfers=links), BLOCK_BYTES)
    # 512 bytes of weights in two blocks of 512 bytes: 2 s to read them, 1.5 s to copy them.
    course = model.path(transfer(Tier.SOURCE, Tier.DEVICE, 2, 2))
    assert course == TransferPath((TransferLeg(LinkDirection.READ, 1.0), TransferLeg(LinkDirection.IN, 0.75)), parts=2)
    assert course.alone_s == 1.0 + 1.0 + 0.75  # the first block is copied while the second is read


@pytest.mark.parametrize(("read_s", "copy_s", "alone_s"), [(2.0, 1.0, 9.0), (1.0, 2.0, 9.0)])
def test_the_slower_leg_sets_the_pace_of_all_parts(read_s: float, copy_s: float, alone_s: float) -> None:
    assert (
        TransferPath((TransferLeg(LinkDirection.READ, read_s), TransferLeg(LinkDirection.IN, copy_s)), parts=4).alone_s
        == alone_s
    )


def test_a_declared_link_stands_for_both_directions_and_has_no_fixed_part() -> None:
    model = TransferModel(round_profile(transfers=Transfers()), BLOCK_BYTES, link_bytes_per_s=5120.0)
    assert legs(model, transfer(Tier.HOST, Tier.DEVICE, 2, 2, None)) == [(LinkDirection.IN, 0.2)]
    assert legs(model, transfer(Tier.DEVICE, Tier.HOST, 2, 2, None)) == [(LinkDirection.OUT, 0.2)]


def test_nothing_reaches_the_device_but_over_a_declared_link() -> None:
    model = TransferModel(round_profile(), BLOCK_BYTES, link_bytes_per_s=5120.0)
    assert legs(model, transfer(Tier.SOURCE, Tier.DEVICE, 0, 1)) == [
        (LinkDirection.READ, 0.040),
        (LinkDirection.IN, 0.1),
    ]


def test_every_rank_has_a_declared_link_of_its_own() -> None:
    profile = round_profile(tensor_parallel=4)
    model = TransferModel(profile, BLOCK_BYTES, link_bytes_per_s=5120.0)
    assert model.copy_s(LinkDirection.IN, 2) == pytest.approx(0.2 / 4)


@pytest.mark.parametrize(
    ("moved", "field"),
    [
        (transfer(Tier.SOURCE, Tier.HOST, 1, 0), "source_to_host"),
        (transfer(Tier.SOURCE, Tier.DEVICE, 0, 1), "source_to_device"),
        (transfer(Tier.SOURCE, Tier.DEVICE, 1, 1), "source_to_host"),
        (transfer(Tier.HOST, Tier.DEVICE, 1, 1), "host_to_device"),
        (transfer(Tier.DEVICE, Tier.HOST, 1, 1, None), "device_to_host"),
    ],
)
def test_a_link_that_the_profile_does_not_know_is_named(moved: Transfer, field: str) -> None:
    model = TransferModel(round_profile(transfers=Transfers()), BLOCK_BYTES)
    with pytest.raises(ProfileError, match=rf"profile round has no transfers\.{field}"):
        model.path(moved)


def test_eight_h800_move_a_block_of_70b_in_parallel() -> None:
    """ELORA's setting (spec R22): each rank moves its shard over a PCI Express 5.0 link of its own."""
    profile = load_profile("h800x8-llama-2-70b")
    block_bytes = profile.geometry.block_bytes(32)
    assert block_bytes == 10 * 2**20
    model = TransferModel(profile, block_bytes)
    for way in (LinkDirection.IN, LinkDirection.OUT):
        assert model.copy_s(way, 100) == pytest.approx(6e-6 + 1000 * 2**20 / 8 / 55.6e9)
