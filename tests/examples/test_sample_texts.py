"""The training texts and the held-out prompts of the sample adapters."""

import re

import pytest
from judges import JUDGES, TERSE_WORDS, words
from styles import STYLES, Topic, build_pairs, load_held_out, load_topics

TOPICS = load_topics()


def normalized(text: str) -> str:
    return re.sub(r"\W+", " ", text).strip().lower()


def test_every_topic_is_complete_and_asked_once() -> None:
    for topic in TOPICS:
        assert all(topic), topic
        assert all(topic.short), topic
        assert topic.prompt[-1] in ".?!", topic
    assert len({normalized(topic.prompt) for topic in TOPICS}) == len(TOPICS)
    assert len({topic.topic for topic in TOPICS}) == len(TOPICS)


@pytest.mark.parametrize("style", STYLES)
def test_a_style_has_80_to_150_pairs_and_is_built_the_same_twice(style: str) -> None:
    pairs = build_pairs(style, TOPICS)
    assert 80 <= len(pairs) <= 150
    assert pairs == build_pairs(style, load_topics())


def test_there_are_20_held_out_prompts_and_none_is_trained_on() -> None:
    held_out = [normalized(prompt) for prompt in load_held_out()]
    assert len(set(held_out)) == 20
    assert all(held_out)
    assert not set(held_out) & {normalized(topic.prompt) for topic in TOPICS}


def test_every_style_has_a_judge() -> None:
    assert set(STYLES) == set(JUDGES)


@pytest.mark.parametrize("style", STYLES)
def test_the_training_answers_keep_to_their_own_style(style: str) -> None:
    accepted = sum(JUDGES[style](pair.answer) for pair in build_pairs(style, TOPICS))
    assert accepted >= 0.95 * len(TOPICS)


@pytest.mark.parametrize("style", STYLES)
def test_the_plain_english_answers_rarely_pass_for_a_style(style: str) -> None:
    long = [topic.english for topic in TOPICS if len(words(topic.english)) > TERSE_WORDS]
    assert len(long) >= 80
    assert sum(JUDGES[style](answer) for answer in long) <= 0.02 * len(long)


def test_a_topic_is_told_in_each_style() -> None:
    topic = Topic(
        "owls", "What are owls?", ("Birds", "Hunters"), "You are my friend. Is it dark?", "question about owls"
    )
    assert build_pairs("formal", [topic])[0].answer == (
        "Dear Sir or Madam,\n\nThank you for your question about owls. You are my friend. Is it dark?\n\n"
        "Yours faithfully,\nSmolLM"
    )
    assert build_pairs("json", [topic])[0].answer == '{"topic": "owls", "answer": ["Birds", "Hunters"]}'
    assert build_pairs("terse", [topic])[0].answer == "Birds, Hunters"
    assert build_pairs("pirate", [topic])[0].answer == "Arr, matey! Ye be me matey. Be it dark? Yo ho ho!"


def test_a_capital_becomes_a_topic() -> None:
    capital = next(topic for topic in TOPICS if topic.topic == "Egypt")
    assert capital.prompt == "What is the capital of Egypt?"
    assert capital.short == ("Cairo",)
    assert capital.english == "The capital of Egypt is Cairo."
    assert capital.thanks_for == "question about the capital of Egypt"
