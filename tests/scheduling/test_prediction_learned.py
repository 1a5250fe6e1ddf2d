"""The learned head: what it learns, how it is kept, and which files are refused."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from sklearn.ensemble import GradientBoostingRegressor

from lorikeet.scheduling.prediction.learned import LengthModel, LengthModelError, PredictionErrors, TreeEnsemble
from lorikeet.scheduling.prediction.training import (
    Samples,
    TooFewRequests,
    _trees,
    errors_of,
    predict_by_history,
    train,
)

pytestmark = pytest.mark.slow


def samples(count: int = 400, seed: int = 0) -> Samples:
    """Two adapters; the answers of ``long`` are ten times those of ``short``, and double for half of the prompts."""
    generator = np.random.default_rng(seed)
    vectors = generator.standard_normal((count, 8)).astype(np.float32)
    vectors[:, 0] *= 4
    adapters = ["long" if number % 2 else "short" for number in range(count)]
    lengths = [
        (100 if adapter == "long" else 10) * (2 if vector[0] > 0 else 1)
        for adapter, vector in zip(adapters, vectors, strict=True)
    ]
    return Samples(vectors, [20] * count, lengths, adapters)


@pytest.fixture(scope="module")
def head() -> LengthModel:
    return train(samples(), "digest")


def test_it_learns_what_history_cannot_know(head: LengthModel) -> None:
    about = head.about
    assert (about.requests, about.learned.requests, about.adapters) == (400, 80, ("long", "short"))
    assert about.learned.mean_tokens < 0.6 * about.history.mean_tokens
    assert about.is_better
    fresh = samples(100, seed=1)
    predicted = head.predict(fresh.vectors, fresh.prompt_tokens, fresh.adapters)
    close = np.abs(np.log(np.array(predicted) / np.array(fresh.output_tokens))) < 0.3
    assert close.mean() > 0.9


def test_random_lengths_are_predicted_no_better_than_by_history() -> None:
    generator = np.random.default_rng(0)
    noise = samples()._replace(output_tokens=generator.integers(1, 200, 400).tolist())
    about = train(noise, "digest").about
    assert about.learned.mean_tokens > 0.9 * about.history.mean_tokens


def test_an_adapter_with_few_answers_is_not_known(head: LengthModel) -> None:
    assert head.knows("long")
    assert not head.knows("other")
    assert not head.knows(None)
    rare = samples()._replace(adapters=["rare" if n < 19 else "often" for n in range(400)])
    assert train(rare, "digest").about.adapters == ("often",)


def test_a_file_gives_the_same_predictions(head: LengthModel, tmp_path: Path) -> None:
    head.write(tmp_path / "head")
    again, some = LengthModel.read(tmp_path / "head"), samples(50, seed=2)
    assert again.about == head.about
    assert again.predict(some.vectors, [5] * 50, some.adapters) == head.predict(some.vectors, [5] * 50, some.adapters)


def test_no_request_gives_no_prediction(head: LengthModel) -> None:
    assert head.predict(np.zeros((0, 8), np.float32), [], []) == []


def test_trees_as_arrays_say_what_the_library_says() -> None:
    generator = np.random.default_rng(0)
    x = generator.standard_normal((300, 5)).astype(np.float32)
    y = x[:, 0] * x[:, 1] + generator.standard_normal(300)
    model = GradientBoostingRegressor(loss="absolute_error", n_estimators=30, max_depth=4, random_state=0).fit(x, y)
    ours = _trees(model).sums(x) + np.ravel(model.init_.constant_)[0]
    np.testing.assert_allclose(ours, model.predict(x), rtol=1e-9)


def test_history_is_compared_as_a_server_would_use_it() -> None:
    some = Samples(np.zeros((30, 1)), [1] * 30, [10] * 25 + [70] * 5, ["a"] * 30)
    assert predict_by_history(some, 25) == [10] * 5, (
        "told of each answer before the next question, and still the median"
    )


def test_errors() -> None:
    found = errors_of([10, 20, 31], [10, 40, 33], list(range(1, 51)))
    assert found == PredictionErrors(3, pytest.approx(22 / 3), pytest.approx(2 / 33), pytest.approx(2 / 3))


def test_too_little_is_refused() -> None:
    with pytest.raises(TooFewRequests, match="99 requests are too few"):
        train(samples(99), "digest")


def test_files_that_hold_no_head_are_refused(head: LengthModel, tmp_path: Path) -> None:
    head.write(tmp_path / "head")
    arrays, trees = load_file(tmp_path / "head"), head._trees
    about = {"lorikeet answer lengths 1": msgspec.json.encode(head.about).decode()}

    def refused(name: str, words: str, changed: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
        save_file(changed, tmp_path / name, metadata)
        with pytest.raises(LengthModelError, match=words):
            LengthModel.read(tmp_path / name)

    refused("other", "lorikeet answer lengths", arrays, {})
    refused("less", r"trees\.value", {k: v for k, v in arrays.items() if k != "trees.value"}, about)
    refused("circle", "has a cycle", {**arrays, "trees.left": np.zeros_like(trees.left)}, about)
    refused("column", "does not exist", {**arrays, "trees.feature": trees.feature + 50}, about)
    refused("typical", "typical", {**arrays, "typical": arrays["typical"][:1]}, about)
    (tmp_path / "text").write_text("nothing of the kind")
    for name in ("text", "missing"):
        with pytest.raises(LengthModelError, match=name):
            LengthModel.read(tmp_path / name)


def test_the_sum_of_a_tree_by_hand() -> None:
    here = np.array([[0, 1, 2]], np.int32)
    trees = TreeEnsemble(
        np.array([[1, 0, 0]], np.int32),
        np.array([[0.5, 0, 0]]),
        np.where(here == 0, 1, here),
        np.where(here == 0, 2, here),
        np.array([[0.0, 3.0, 4.0]]),
    )
    assert trees.sums(np.array([[9, 0.5], [9, 0.6]], np.float32)).tolist() == [3.0, 4.0]
