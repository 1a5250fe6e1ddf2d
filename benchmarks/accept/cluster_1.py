"""cluster.1: the specs' worked examples of placement, routing and migration, and their properties, each a unit test."""

from benchmarks.accept.examples import run_examples
from benchmarks.accept.lines import Result, line
from benchmarks.accept.runs import StoredRuns

_LORASERVE, _TABLE, _POOL = "test_placement_loraserve.py", "test_routing_table.py", "test_adapter_pool.py"
_TOPPINGS, _POLICIES = "test_routing_toppings.py", "test_routing_policies.py"
_BURST, _ILP = "test_burst_placement.py", "test_comigration.py"
EXAMPLES = {
    "LoRAServe A": f"{_LORASERVE}::test_example_a_splits_an_adapter_and_merges_a_leftover_with_its_other_part",
    "LoRAServe B": f"{_LORASERVE}::test_example_b_trims_the_rank_that_gained_most_from_rounding",
    "LoRAServe B, literal": f"{_LORASERVE}::test_example_b_literal_sends_all_of_rank_8_to_the_largest_rank",
    "LoRAServe C": f"{_LORASERVE}::test_example_c_fills_spare_replicas_with_leftovers",
    "LoRAServe C, literal": f"{_LORASERVE}::test_example_c_literal_leaves_replicas_idle",
    "LoRAServe D": f"{_LORASERVE}::test_example_d_moves_two_of_five_adapters",
    "LoRAServe E, intervals": f"{_TABLE}::test_example_e_intervals_are_half_open",
    "LoRAServe E, 10,000 draws": f"{_TABLE}::test_example_e_draws_follow_the_shares",
    "LoRAServe's storage sequence": f"{_POOL}::test_the_storage_sequence",
    "TOPPINGS' scheduler table": f"{_TOPPINGS}::test_worked_example_of_the_scheduler",
    "TOPPINGS' queue case": f"{_TOPPINGS}::test_the_queue_case",
    "TOPPINGS, idle and feasible": f"{_TOPPINGS}::test_an_idle_replica_that_keeps_the_slo_wins_with_total_0",
    "TOPPINGS, idle and not feasible": f"{_TOPPINGS}::test_an_idle_replica_that_would_break_the_slo_does_not_win",
    "dLoRA 6c: KV of a token": f"{_BURST}::test_ex_6c_what_a_request_holds_follows_from_the_model",
    "dLoRA 7a: burst tolerance": f"{_BURST}::test_ex_7a_the_adapter_with_the_lowest_tolerance_gets_the_next_copy",
    "dLoRA 7b: dispatch": f"{_POLICIES}::test_ex_7b_the_adapters_load_time_counts_where_it_is_absent",
    "dLoRA 8a": f"{_ILP}::test_ex_8a_one_type_moves_as_a_whole",
    "dLoRA 8b": f"{_ILP}::test_ex_8b_what_is_balanced_stays",
    "dLoRA 8b, as printed": f"{_ILP}::test_ex_8b_the_printed_factor_cannot_tell_staying_from_swapping",
    "dLoRA 8c": f"{_ILP}::test_ex_8c_a_vertex_is_rounded_to_the_best_whole_plan_and_an_even_split_is_not",
    "dLoRA 8d": f"{_ILP}::test_ex_8d_what_exceeds_the_memory_is_swapped",
    "dLoRA 8e": f"{_ILP}::test_ex_8e_a_moved_request_prefills_all_that_it_knows_and_goes_on_with_token_31",
    "property: shares add up to 1, every adapter has a home": (
        f"{_LORASERVE}::test_shares_add_up_to_one_and_every_adapter_has_a_home"
    ),
    "property: the load bound": (
        f"{_LORASERVE}::test_no_replica_has_more_than_twice_the_mean_if_all_ranks_cost_the_same"
    ),
    "property: no permutation moves less": f"{_LORASERVE}::test_no_permutation_moves_fewer_bytes",
    "property: never the last copy": f"{_POOL}::TestPoolMachine::runTest",
    "property: a plan never raises its own objective": (
        f"{_ILP}::test_a_plan_is_sound_and_never_raises_its_own_objective"
    ),
}


@line(
    "cluster.1",
    title="The specs' worked examples of placement, routing and migration, and their properties, as unit tests",
    bound="every one passes",
)
def run(runs: StoredRuns) -> Result:
    """Run each by its name."""
    return run_examples(EXAMPLES, "tests/cluster")
