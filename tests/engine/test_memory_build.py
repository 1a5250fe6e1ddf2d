"""How adapters arrive whose prefills are assisted, from a row and the sizes of an engine."""

from lorikeet.core.plan import AS_THEY_LIE
from lorikeet.engine.executor import EngineSizes
from lorikeet.engine.memory_build import build_memory
from lorikeet.rows import resolve_row
from tests.scheduling.test_assist_costs import COSTS, LLAMA_2_7B, _adapter

LONG, RANK = 8192, 64
SIZES = EngineSizes(LLAMA_2_7B, LLAMA_2_7B, 1000, 1000, 16, LONG, 500, "none", COSTS)


def test_of_a_prompt_that_takes_several_steps_the_first_ones_part_decides() -> None:
    _, row = resolve_row("toppings:auto")
    assert COSTS.pays(_adapter(RANK), 512)
    assert not COSTS.pays(_adapter(RANK), LONG)
    assist = build_memory(row, SIZES, 512)._assist
    assert assist(_adapter(RANK), LONG) == assist(_adapter(RANK), 512) != AS_THEY_LIE
    assert build_memory(row, SIZES, LONG)._assist(_adapter(RANK), LONG) == AS_THEY_LIE
