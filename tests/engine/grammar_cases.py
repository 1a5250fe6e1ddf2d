"""Answers that follow a grammar: a model, its owners and cases."""

import json
import random
import re
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest
from llguidance import LLTokenizer

from lorikeet.chat.grammar_process import GrammarKind, GrammarReader, GrammarSpec
from lorikeet.core.adapter import AdapterRef
from tests.support.api_server import END, TOKENIZER
from tests.support.live import make_adapter, make_model
from tests.support.schemas import random_regex, random_schema

VOCABULARY = TOKENIZER.get_vocab_size()

SCHEMAS, REGEXES = 10, 2
"""Of requests that run together."""

READER = GrammarReader(LLTokenizer(TOKENIZER.to_str(), n_vocab=VOCABULARY, eos_token=[END]))

CLOSING = tuple((token_id, 6.0) for token_id in {TOKENIZER.encode(text).ids[0] for text in '"}],:0'} | {END})
"""Biases towards the ends of strings and lists, which a model without training seldom chooses."""


class Case(NamedTuple):
    """A grammar that was checked, and how an answer is judged."""

    grammar: str
    schema: dict[str, Any] | None = None
    regex: str = ""

    def judge(self, text: str) -> None:
        if self.schema is not None:
            # Exactly: the model may write 1.00000000000000000001, which is more than 1.
            jsonschema.Draft202012Validator(self.schema).validate(json.loads(text, parse_float=Decimal))
        else:
            assert re.fullmatch(self.regex, text, re.ASCII), f"{self.regex} {text!r}"


def schema_case(schema: dict[str, Any]) -> Case:
    checked = READER.check(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema), "p"))
    return Case(checked.grammar, schema)


def regex_case(pattern: str) -> Case:
    return Case(READER.check(GrammarSpec(GrammarKind.REGEX, pattern, "p")).grammar, regex=pattern)


def cases_of(group: int) -> list[Case]:
    choose = random.Random(group)
    schemas = [schema_case(random_schema(choose)) for _ in range(SCHEMAS)]
    return [*schemas, *(regex_case(random_regex(choose)) for _ in range(REGEXES))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("models") / "tiny", vocab_size=VOCABULARY)
    TOKENIZER.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    return folder


@pytest.fixture(scope="module")
def owners(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[AdapterRef | None]:
    folder = tmp_path_factory.mktemp("adapters")
    return [None, make_adapter(folder / "a", model, 1), make_adapter(folder / "b", model, 2)]
