"""memory.2: the worked examples of the specs, each a unit test."""

from benchmarks.accept.examples import run_examples
from benchmarks.accept.lines import Result, line
from benchmarks.accept.runs import StoredRuns

EXAMPLES = {
    "ELORA eq. 3: of 20 adapters, of 50, and of 50 by Zipf a batch of 32 needs 16.13, 23.81 and 17.03": (
        "test_policy_elora.py::test_required_adapters_of_a_batch_of_32_are_as_worked_out_by_hand"
    ),
    "ELORA eq. 4: 1 if nothing is required": (
        "test_policy_elora.py::test_the_coefficient_rises_to_1_and_is_1_if_nothing_is_required"
    ),
    "ELORA eq. 5: 1 - sigmoid(t) for t = 0, 1, 5, 10, 100": ("test_policy_elora.py::test_recency_is_one_minus_sigmoid"),
    "ELORA eq. 5: ages beyond 37 and 709 keep their order": (
        "test_policy_elora.py::test_ages_at_which_the_printed_form_is_0_or_overflows_keep_their_order"
    ),
    "ELORA eq. 4 mirrored: out, N / (N - 1)": (
        "test_policy_elora.py::test_below_low_an_adapter_that_would_leave_counts_n_over_n_minus_1_of_kv"
    ),
    "ELORA eq. 4: in, (N + 1) / N": (
        "test_policy_elora.py::test_below_low_an_adapter_that_would_come_counts_n_plus_1_over_n_of_kv"
    ),
    "ELORA eq. 4: the last adapter, mirrored and as printed": (
        "test_policy_elora.py::test_the_last_adapter_stays_while_there_is_kv_and_by_the_printed_formula_leaves_first"
    ),
    "ELORA eq. 4: without any adapter, adapters first": (
        "test_policy_elora.py::test_without_any_adapter_all_kv_comes_after_all_adapters"
    ),
    "Chameleon's score, its order, FairShare's and LRU's": "test_policy_chameleon.py::test_the_worked_example",
    "Chameleon with recency alone is LRU": "test_policy_chameleon.py::test_with_recency_alone_it_is_lru",
    "ELORA: KV and adapters of Llama-2-70B; Chameleon: of Llama-2-7B, and 100 adapters of five ranks": (
        "test_spec_sizes.py::test_kv_and_adapters_take_what_the_specs_work_out"
    ),
}
_FOLDER = "tests/memory"


@line(
    "memory.2",
    title="The specs' worked examples as unit tests",
    bound="every one passes",
)
def run(runs: StoredRuns) -> Result:
    """Run each by its name."""
    return run_examples(EXAMPLES, _FOLDER)
