"""modes.2: the specs' worked examples of batching modes and of pipeline planning, each a unit test."""

from benchmarks.accept.examples import run_examples
from benchmarks.accept.lines import Result, line
from benchmarks.accept.runs import StoredRuns

_DLORA, _PIPELINE = "test_batching_examples.py", "test_pipeline_planning.py"
EXAMPLES = {
    "dLoRA 2b: one type at a time takes two rounds": (
        f"{_DLORA}::test_ex_2b_one_adapter_at_a_time_takes_two_rounds_where_unmerged_takes_one"
    ),
    "dLoRA 3a": f"{_DLORA}::test_ex_3a_a_ratio_above_alpha_merges",
    "dLoRA 3b": f"{_DLORA}::test_ex_3b_a_ratio_below_alpha_stays_unmerged",
    "dLoRA 3c": f"{_DLORA}::test_ex_3c_a_ratio_above_beta_stays_merged_and_the_batch_is_not_filled_up",
    "dLoRA 3d": f"{_DLORA}::test_ex_3d_a_ratio_below_beta_unmerges",
    "dLoRA 3e": f"{_DLORA}::test_ex_3e_a_ratio_equal_to_beta_stays_merged",
    "dLoRA 3f": f"{_DLORA}::test_ex_3f_an_adapter_that_is_no_longer_legal_is_unmerged",
    "dLoRA 3g": f"{_DLORA}::test_ex_3g_an_adapter_without_requests_is_unmerged",
    "dLoRA 4a: 3 iterations pay for a switch, 2 tie, 1 does not": (
        f"{_DLORA}::test_ex_4a_the_switch_is_spread_over_the_iterations"
    ),
    "dLoRA 4b: alpha": f"{_DLORA}::test_ex_4b_alpha_falls_where_merging_would_have_served_more",
    "dLoRA 4c: beta": f"{_DLORA}::test_ex_4c_beta_rises_where_unmerging_would_have_served_more",
    "dLoRA 5: credits over five iterations": (
        f"{_DLORA}::test_ex_5_who_is_passed_over_earns_credit_and_comes_first_when_it_has_enough"
    ),
    "dLoRA 5b, unmerged": f"{_DLORA}::test_ex_5b_an_adapter_without_credit_is_not_merged",
    "dLoRA 5b, merged": f"{_DLORA}::test_ex_5b_a_merged_adapter_whose_credit_runs_out_is_unmerged",
    "TOPPINGS 3.4: four groups of 2, loads": (
        f"{_PIPELINE}::test_loads_of_four_groups_end_at_5_10_15_and_group_1_last_at_20"
    ),
    "TOPPINGS 3.4: dynamic": f"{_PIPELINE}::test_dynamic_ends_at_16_with_placement_ccggcgcg",
    "TOPPINGS 3.4: resident": f"{_PIPELINE}::test_adapter_is_resident_at_20_after_the_first_token_at_16",
    "TOPPINGS 3.4: static": f"{_PIPELINE}::test_static_ends_at_17",
    "TOPPINGS 3.4: M = 1": f"{_PIPELINE}::test_one_load_ends_at_17_and_its_prefill_at_20_with_placement_ccccccgg",
    "TOPPINGS 3.4: all on the host": f"{_PIPELINE}::test_all_on_the_host_ends_at_24",
    "TOPPINGS 3.4: load, then prefill": f"{_PIPELINE}::test_load_then_prefill_ends_at_25",
    "TOPPINGS 3.4: cached": f"{_PIPELINE}::test_cached_ends_at_8",
    "TOPPINGS 3.4: l = 0.5": (
        f"{_PIPELINE}::test_with_loads_of_half_a_unit_dynamic_ends_at_12_with_placement_ccgggggg"
    ),
    "TOPPINGS 3.4: groups of 1, fixed order": (
        f"{_PIPELINE}::test_groups_of_one_end_at_22_in_fixed_order_with_placement_cgcccccc"
    ),
    "TOPPINGS 3.4: groups of 1, look-ahead": (
        f"{_PIPELINE}::test_groups_of_one_end_at_16_with_look_ahead_with_placement_cgcgcggc"
    ),
    "TOPPINGS 3.4: groups of 4": (f"{_PIPELINE}::test_groups_of_four_end_at_16_with_placement_ccccgggg_resident_at_18"),
    "TOPPINGS 3.4: look-ahead changes nothing for groups of 2": (
        f"{_PIPELINE}::test_look_ahead_leaves_groups_of_two_unchanged"
    ),
    "TOPPINGS 3.4: balance alone misleads": f"{_PIPELINE}::test_balance_alone_misleads",
}


@line(
    "modes.2",
    title="The specs' worked examples (dLoRA's algorithms, TOPPINGS' pipelines) as unit tests",
    bound="every one passes",
)
def run(runs: StoredRuns) -> Result:
    """Run each by its name."""
    return run_examples(EXAMPLES, "tests/scheduling")
