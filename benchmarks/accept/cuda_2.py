"""cuda.2: streams, events, graphs and registered memory, on a device that does its work as late as it may."""

from benchmarks.accept.examples import run_examples
from benchmarks.accept.lines import Result, line
from benchmarks.accept.runs import StoredRuns

_COPIES, _GRAPHS = "test_late_device.py::test_", "test_decode_graphs.py::test_"
_HANDED_OVER = "test_host_lora_pool.py::test_"
EXAMPLES = {
    "no read before its copy's event, no reuse of a block in flight, tokens of transformers and PEFT": (
        f"{_COPIES}steps_and_late_copies_never_touch_the_same"
    ),
    "copies that do not follow the steps would be seen": (
        f"{_COPIES}copies_that_do_not_follow_the_steps_would_be_seen"
    ),
    "copies that are told too early would be seen": f"{_COPIES}copies_that_are_told_too_early_would_be_seen",
    "only registered memory is copied, as long as it is": f"{_COPIES}memory_must_be_registered_while_it_is_copied",
    "an event is behind all work before it, and no other": (
        f"{_COPIES}a_copy_is_done_when_somebody_waits_for_a_mark_behind_it"
    ),
    "graphs choose the tokens of steps that are called": f"{_GRAPHS}replayed_steps_choose_the_tokens_of_called_ones",
    "log probabilities of the step that chose": f"{_GRAPHS}log_probabilities_are_of_the_step_that_chose",
    "one graph for any mix of adapters, the exact base path without": (f"{_GRAPHS}a_graph_serves_any_mix_of_adapters"),
    "no host sync in a decode step: the next begins before the last one's tokens are there": (
        f"{_GRAPHS}the_next_step_begins_before_the_tokens_of_the_last_are_there"
    ),
    "tokens are told while the next step runs, whoever leaves meanwhile": (
        f"{_GRAPHS}an_overlapped_plan_returns_after_each_step_while_the_next_runs"
    ),
    "a step that nobody wants any more is waited for": (f"{_GRAPHS}a_step_that_is_not_gone_on_with_is_forgotten"),
    "kernels that wait would be seen": f"{_GRAPHS}kernels_that_wait_would_be_seen",
    "tokens that are read before their event would be seen": (f"{_GRAPHS}tokens_that_are_read_too_early_would_be_seen"),
    "rows that fill a graph store nothing": f"{_GRAPHS}rows_that_fill_a_graph_store_nothing",
    "host workers: the thread goes on while the device has not come to what it launched": (
        f"{_HANDED_OVER}the_thread_goes_on_while_the_device_has_not_come_to_what_it_launched"
    ),
    "graphs beside late copies, whole engine": f"{_COPIES}graphs_and_late_copies_never_touch_the_same",
}
_FOLDER = "tests/engine"


@line(
    "cuda.2",
    title="Streams, events, graphs and registered memory on a fake device that checks their order",
    bound="no read before its copy's event, no reuse of a block in flight, no host sync in a decode step; every test "
    "passes, and those whose order is broken on purpose are seen",
)
def run(runs: StoredRuns) -> Result:
    """Run each by its name."""
    return run_examples(EXAMPLES, _FOLDER)
