"""What the training script feeds the model: no training here."""

import random
from types import SimpleNamespace
from typing import Any

import torch
from styles import Pair
from train_adapters import batches, encode


class LetterTokenizer:
    """One token per character; the template wraps the prompt in angle brackets."""

    eos_token_id = 0

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        assert options == {"tokenize": False, "add_generation_prompt": True}
        return f"<{messages[0]['content']}>"

    def __call__(self, text: str, add_special_tokens: bool) -> SimpleNamespace:
        assert not add_special_tokens
        return SimpleNamespace(input_ids=[ord(letter) for letter in text])


def test_only_the_answer_and_the_end_of_the_turn_are_learned() -> None:
    example = encode(LetterTokenizer(), Pair("ab", "yz"))
    assert example.input_ids == [*map(ord, "<ab>yz"), 0]
    assert example.labels == [-100, -100, -100, -100, ord("y"), ord("z"), 0]


def test_an_epoch_has_every_example_once_and_padding_is_not_learned() -> None:
    examples = [encode(LetterTokenizer(), Pair("p" * n, "a" * n)) for n in range(1, 11)]
    seen: list[tuple[list[int], list[int]]] = []
    for ids, labels in batches(examples, 7, random.Random(3)):
        assert ids.shape == labels.shape
        for row, label in zip(ids.tolist(), labels.tolist(), strict=True):
            length = row.index(0) + 1
            assert set(row[length:]) <= {7}
            assert set(label[length:]) <= {-100}
            seen.append((row[:length], label[:length]))
    assert sorted(seen) == sorted(map(tuple, examples))


def test_the_order_of_an_epoch_depends_on_the_seed_alone() -> None:
    examples = [encode(LetterTokenizer(), Pair("p", "a" * n)) for n in range(1, 9)]

    def order(seed: int) -> list[torch.Tensor]:
        return [ids for ids, _ in batches(examples, 7, random.Random(seed))]

    assert all(torch.equal(one, two) for one, two in zip(order(1), order(1), strict=True))
    assert [ids.shape for ids in order(1)] != [ids.shape for ids in order(2)]
