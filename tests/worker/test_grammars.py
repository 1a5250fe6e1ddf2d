"""Masks against brute force over a tiny vocabulary, and samplers that follow grammars."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer

from lorikeet.chat.grammar_process import GrammarKind, GrammarSpec, Marker, Thoughts, notation
from lorikeet.core.plan import SequenceStart, Token
from lorikeet.core.request import SamplingParams
from lorikeet.kernels.sampling import choose
from lorikeet.worker.batch import RankSequence
from lorikeet.worker.grammars import GrammarCompiler, GrammarError, GrammarMasks, device_addends
from lorikeet.worker.sampler import Sampler
from tests.support.api_server import END, TOKENIZER

CPU = torch.device("cpu")
VOCABULARY = TOKENIZER.get_vocab_size() + 7  # wider than the tokenizer, as in checkpoints with padding
LETTERS = "ab{}"


def grammar(kind: str, text: str) -> str:
    return notation(GrammarSpec(GrammarKind(kind), text, "p"))


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    file = tmp_path_factory.mktemp("grammars") / "tokenizer.json"
    TOKENIZER.save(str(file))
    return GrammarCompiler(file, VOCABULARY, (END,))


def takes(spec: GrammarSpec, text: str) -> bool:
    """Whether a text is a whole answer of a grammar."""
    matcher = LLMatcher(LLTokenizer(TOKENIZER.to_str(), n_vocab=VOCABULARY, eos_token=[END]), notation(spec))
    token_ids = TOKENIZER.encode(text).ids
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "grammar", "answer"),
    [
        ("json_schema", '{"type": "object", "properties": {}, "additionalProperties": false}', "{}"),
        ("regex", "a+", "aa"),
        ("choice", '["a", "b"]', "b"),
        ("ebnf", 'root ::= "a" | "b"', "b"),
        ("lark", '%llguidance {}\nstart: part "!"\npart[lazy]: /[a-z]*/ "x"', "hmx!"),
    ],
)
def test_thoughts_may_come_before_an_answer_that_follows_a_grammar(kind: str, grammar: str, answer: str) -> None:
    thoughts = Thoughts(Marker("<think>"), Marker("</think>"))
    plain = GrammarSpec(GrammarKind(kind), grammar, "p")
    may, must = (
        msgspec.structs.replace(plain, thoughts=msgspec.structs.replace(thoughts, are_open=is_open))
        for is_open in (False, True)
    )
    for begin in ("<think>hm, aa", "<think>"):
        assert not takes(plain, f"{begin}</think>{answer}")
        assert takes(may, f"{begin}</think>\n\n{answer}")
    assert takes(may, answer)
    assert takes(must, f"hm\n</think>{answer}")
    assert takes(must, f"<think>hm</think>{answer}")
    for spec, text in ((may, f"hm</think>{answer}"), (may, "<think>hm</think>?"), (must, answer), (must, "hm")):
        assert not takes(spec, text), text


def sequence(text: str, outputs: list[int] | None = None, **params: Any) -> RankSequence:
    sampling = SamplingParams(
        **{"max_tokens": 100, "temperature": 0.0, "stop_token_ids": (END,), **params}, grammar=text
    )
    return RankSequence(SequenceStart("r", [1, 2, *(outputs or [])], 2, sampling, None))


def allowed(masks: GrammarMasks, each: RankSequence) -> set[int]:
    masked = masks.begin([each]).result()
    (addends,) = masked.addends_for(torch.zeros(1, VOCABULARY))
    assert torch.equal(addends, device_addends(masked.bits, torch.zeros(1, VOCABULARY))[0])
    assert addends.shape == (VOCABULARY,)
    return set(torch.nonzero(addends == 0).flatten().tolist())


def one(letter: str) -> int:
    (token_id,) = TOKENIZER.encode(letter).ids
    return token_id


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["a*b", "(ab|ba)*", "a{2}b?", r"\{(a|b)*\}", "(a|b){0,3}"])
def test_masks_equal_brute_force(compiler: GrammarCompiler, pattern: str) -> None:
    """After up to four letters another may follow if a text of up to eight letters that begins so matches."""
    masks = GrammarMasks(compiler, CPU, torch.float32)
    words = {"".join(word) for size in range(9) for word in itertools.product(LETTERS, repeat=size)}
    full = {word for word in words if re.fullmatch(pattern, word)}
    begins = {word[:size] for word in full for size in range(len(word) + 1)}
    text = grammar("regex", pattern)
    for start in sorted(begin for begin in begins if len(begin) <= 4):
        may_follow = {letter for letter in LETTERS if start + letter in begins}
        found = allowed(masks, sequence(text, [one(letter) for letter in start]))
        assert {letter for letter in LETTERS if one(letter) in found} == may_follow, start
        assert (END in found) == (start in full), start
    masks.close()


def test_a_sequence_reads_its_new_tokens_only_and_a_resumed_one_all(compiler: GrammarCompiler) -> None:
    masks = GrammarMasks(compiler, CPU, torch.float32)
    text = grammar("choice", '["ab", "ba"]')
    walked = sequence(text)
    for letter in "ba":
        assert one(letter) in allowed(masks, walked)
        walked.add_token(one(letter))
    assert allowed(masks, walked) == allowed(masks, sequence(text, [one("b"), one("a")])) == {END}
    masks.close()


def test_the_sampler_follows_the_grammar_of_some_rows(compiler: GrammarCompiler) -> None:
    masks = GrammarMasks(compiler, CPU, torch.float32)
    sampler = Sampler(choose, masks)
    free = RankSequence(SequenceStart("f", [1, 2], 2, SamplingParams(max_tokens=9, temperature=0.0), None))
    bound = sequence(grammar("regex", "a+b"), temperature=1.0, seed=3)
    said = ""
    logits = torch.zeros(2, VOCABULARY)
    logits[:, one("}")] = 5.0
    logits[1, one("b")] = 1.0
    for _ in range(20):
        sampler.begin([free, bound])
        first, second = sampler.sample(logits.clone(), [free, bound])
        assert isinstance(first, Token)
        assert first.token_id == one("}")
        assert isinstance(second, Token)
        bound.add_token(second.token_id)
        if second.token_id == END:
            break
        said += TOKENIZER.decode([second.token_id])
    assert re.fullmatch("a+b", said)
    masks.close()


def test_min_tokens_forbids_the_end_only_if_the_grammar_can_continue(compiler: GrammarCompiler) -> None:
    masks = GrammarMasks(compiler, CPU, torch.float32)
    logits = torch.zeros(1, VOCABULARY)
    logits[0, END] = 5.0
    sampler = Sampler(choose, masks)
    for pattern, expected in (("ab*", "b"), ("a", "")):
        each = sequence(grammar("regex", pattern), [one("a")], min_tokens=5)
        sampler.begin([each])
        (token,) = sampler.sample(logits.clone(), [each])
        assert isinstance(token, Token)
        assert TOKENIZER.decode([token.token_id], skip_special_tokens=True) == expected
    masks.close()


def test_a_sequence_that_leaves_its_grammar_fails_alone_with_a_reason(compiler: GrammarCompiler) -> None:
    masks = GrammarMasks(compiler, CPU, torch.float32)
    sampler = Sampler(choose, masks)
    text = grammar("regex", "a+")
    rows = [sequence(text, [one("b")]), sequence(text, [one("a")]), sequence("start: nothing_of_that_name")]
    sampler.begin(rows)
    lost, kept, broken = sampler.sample(torch.zeros(3, VOCABULARY), rows)
    assert isinstance(lost, str)
    assert "cannot follow its grammar" in lost
    assert isinstance(kept, Token)
    assert isinstance(broken, str)
    assert "unknown name" in broken
    masks.close()


def test_log_probabilities_ignore_the_grammar(compiler: GrammarCompiler) -> None:
    masks = GrammarMasks(compiler, CPU, torch.float32)
    logits = torch.zeros(1, VOCABULARY)
    sampler = Sampler(choose, masks)
    each = sequence(grammar("regex", "ab"), logprobs=0)
    sampler.begin([each])
    (token,) = sampler.sample(logits.clone(), [each])
    assert isinstance(token, Token)
    assert token.logprob == pytest.approx(float(torch.log_softmax(logits[0], 0)[one("a")]))
    masks.close()


def test_a_grammar_is_compiled_once(compiler: GrammarCompiler) -> None:
    text = grammar("json_schema", json.dumps({"type": "object"}))
    assert compiler.compile(text) is compiler.compile(text)


def test_a_model_without_tokenizer_has_no_grammars(tmp_path: Path) -> None:
    compiler = GrammarCompiler(tmp_path / "tokenizer.json", VOCABULARY, (END,))
    with pytest.raises(GrammarError, match=r"tokenizer\.json"):
        compiler.matcher('start: "a"')
    compiler.close()


def test_end_tokens_of_an_adapter_or_a_request_may_come_where_the_grammar_may_end(compiler: GrammarCompiler) -> None:
    masks = GrammarMasks(compiler, CPU, torch.float32)
    own = VOCABULARY - 2
    text = grammar("regex", "ab?")
    stops = (END, own, one("}"))
    assert allowed(masks, sequence(text, stop_token_ids=stops)) == {one("a")}
    assert allowed(masks, sequence(text, [one("a")], stop_token_ids=stops)) == {one("b"), *stops}
    assert allowed(masks, sequence(text, [one("a"), one("b")], stop_token_ids=stops)) == set(stops)
    (is_end,) = masks.begin([sequence(text, [one("a"), one("b")], stop_token_ids=stops)]).result().end
    assert is_end
    masks.close()


def test_an_answer_without_possible_tokens_is_reported(compiler: GrammarCompiler) -> None:
    schema = {"properties": {"a": {}}, "patternProperties": {"^a$": {}}, "additionalProperties": False}
    compact = {"whitespace_flexible": False}
    text = LLMatcher.grammar_from_json_schema(json.dumps({"type": "object", **schema}), defaults=compact)
    masks = GrammarMasks(compiler, CPU, torch.float32)
    lost = sequence(text, TOKENIZER.encode('{"a":1,').ids)
    assert allowed(masks, lost) == set()
    assert "cannot follow its grammar any further" in masks.error(lost)
    masks.close()
