"""The table of architectures."""

from lorikeet.models.architectures import ARCHITECTURES
from tests.models.checkpoints import VARIANTS

OTHER_PARTS = {"Gemma3ForConditionalGeneration", "Qwen3_5ForConditionalGeneration"}
"""Architectures whose decoder is that of another row; ``test_config`` reads their configs."""


def test_every_architecture_has_a_checkpoint_for_the_tests_of_the_decoder() -> None:
    types = {config.model_type for config, _ in VARIANTS.values()}
    named = {name.removesuffix("ForCausalLM").lower() for name in ARCHITECTURES if name not in OTHER_PARTS}
    assert {kind.removesuffix("_text") for kind in types} == named
