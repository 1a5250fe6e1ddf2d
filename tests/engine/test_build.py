"""How adapters arrive whose prefills are assisted, from a preset and the sizes of an engine."""

import pytest

from lorikeet.config import ConfigError, EngineSettings, Settings
from lorikeet.core.clock import VirtualClock
from lorikeet.core.plan import PACKING_ORDER
from lorikeet.costs.engine_sizes import EngineSizes
from lorikeet.engine.build import assemble, threads_note
from lorikeet.presets import resolve_preset
from lorikeet.scheduling.assist_planner import AssistPlanner
from lorikeet.scheduling.engine_load import EngineLoad
from tests.costs.assist_cases import COSTS, LLAMA_2_7B, adapter_of_rank
from tests.support.scripted_executor import ScriptedExecutor

LONG, RANK = 8192, 64
SIZES = EngineSizes(LLAMA_2_7B, LLAMA_2_7B, 1000, 1000, 16, LONG, 500, "none", COSTS)


def test_assistance_is_planned_for_the_first_chunk_of_a_prompt() -> None:
    _, preset = resolve_preset("lorikeet:assist")
    assert COSTS.pays(adapter_of_rank(RANK), 512)
    assert not COSTS.pays(adapter_of_rank(RANK), LONG)
    planner = AssistPlanner(COSTS, SIZES, 512, preset.cold_start, EngineLoad())
    assert (
        planner.load_order(adapter_of_rank(RANK), LONG)
        == planner.load_order(adapter_of_rank(RANK), 512)
        != PACKING_ORDER
    )
    planner = AssistPlanner(COSTS, SIZES, LONG, preset.cold_start, EngineLoad())
    assert planner.load_order(adapter_of_rank(RANK), LONG) == PACKING_ORDER


@pytest.mark.parametrize(
    ("preset", "complaint"),
    [
        # Adapters with KV would fill their part for ever, and whoever asks for another one would wait as long.
        ("lorikeet:plain,memory_split=static", "set dependency_tree=false or kv_after_finish=dropped"),
        ("elora,memory_split=static,adapter_share=0.3", "set dependency_tree=false or kv_after_finish=dropped"),
        ("dlora,memory_split=static", "a static memory split"),
    ],
)
def test_incompatible_preset_options_are_refused(preset: str, complaint: str) -> None:
    clock = VirtualClock()
    with pytest.raises(ConfigError, match=complaint):
        assemble(
            Settings(engine=EngineSettings(preset=preset)), ScriptedExecutor(clock, SIZES.block_size), SIZES, clock
        )


@pytest.mark.parametrize("axes", ["dependency_tree=false", "kv_after_finish=dropped"])
def test_static_split_is_accepted_if_adapters_can_be_evicted(axes: str) -> None:
    clock = VirtualClock()
    preset = f"lorikeet:plain,memory_split=static,{axes}"
    assemble(Settings(engine=EngineSettings(preset=preset)), ScriptedExecutor(clock, SIZES.block_size), SIZES, clock)


def test_more_threads_than_cores_are_warned_of() -> None:
    assert threads_note(0, 2) == "threads of a rank: a fair share of 2 cores"
    assert "only 2 cores" in threads_note(4, 2)
    assert "only" not in threads_note(2, 2)
