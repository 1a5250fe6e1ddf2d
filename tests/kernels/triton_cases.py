"""Cases for the Triton kernels."""

import hypothesis.strategies as st
from hypothesis import settings

from tests.kernels import attention_cases as attention
from tests.support.step_counts import examples

FEW = settings(max_examples=examples(4))

lengths = st.one_of(st.integers(1, 20), st.sampled_from([31, 32, 33, 64, 65]))


@st.composite
def shapes(draw: st.DrawFn) -> attention.Shape:
    """Decodes, prefills and what lies between, on both sides of the sizes that the kernel cuts at."""
    sequences = []
    for _ in range(draw(st.integers(1, 2))):
        rows = draw(lengths)
        sequences.append((rows, rows + draw(st.one_of(st.just(0), lengths))))
    return attention.Shape(
        sequences,
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from([1, 2, 3, 4, 7])),
        head_dim=draw(st.sampled_from([16, 32, 64, 80, 128, 7])),
        block_size=draw(st.sampled_from([1, 5, 16, 64])),
        window=draw(st.sampled_from([0, 0, 1, 17, 100])),
        softcap=draw(st.sampled_from([0.0, 1.5])),
    )
