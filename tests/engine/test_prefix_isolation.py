"""KV is reused under the adapter version that made it and under no other, and the check would notice if it were."""

from pathlib import Path

import msgspec
import pytest

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.executor import ExecutorError
from lorikeet.core.ids import AdapterDigest
from lorikeet.engine.build import build_replica
from lorikeet.memory import memory
from lorikeet.memory.tree import block_keys
from tests.support.live import greedy, live_settings, make_adapter, make_model, prompt, run
from tests.support.scripted import Bench, adapter, request

pytestmark = pytest.mark.slow

PROMPT = prompt(40)
TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def versions(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[AdapterRef | None]:
    """The base, two adapters, and a second version under the name of the second."""
    folder = tmp_path_factory.mktemp("adapters")
    a, b, new = (make_adapter(folder / name, model, seed) for seed, name in enumerate(("a", "b", "new")))
    return [None, a, b, msgspec.structs.replace(new, name=b.name)]


def ask(model: Path, versions: list[AdapterRef | None], *, together: bool) -> list[list[int]]:
    """Ask every version the same, all in one engine or each in one of its own. Twice, so that KV is reused."""
    answers = []
    groups = [versions] if together else [[version] for version in versions]
    for group in groups:
        engine = build_replica(live_settings(model)).engine
        try:
            for ending in ([1], [2]):
                named = {f"{index} {ending}": version for index, version in enumerate(group)}
                answers += run(engine, [greedy(name, PROMPT + ending, TOKENS, v) for name, v in named.items()])
            assert engine.stats().prefix_hits_tokens >= 40 * len(group), "KV was reused"
        finally:
            engine.close()
    return sorted(answers)


@pytest.fixture(scope="module")
def alone(model: Path, versions: list[AdapterRef | None]) -> list[list[int]]:
    """What every version says with nobody else around."""
    answers = ask(model, versions, together=False)
    assert len({tuple(answer) for answer in answers}) == len(answers), "every version says something else"
    return answers


def test_versions_that_share_an_engine_say_what_each_says_alone(
    model: Path, versions: list[AdapterRef | None], alone: list[list[int]]
) -> None:
    assert ask(model, versions, together=True) == alone


def share_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the tree: KV is keyed by tokens alone."""
    monkeypatch.setattr(memory, "block_keys", lambda digest, *rest, **salt: block_keys(None, *rest, **salt))


def test_the_check_notices_reuse_across_adapters(
    monkeypatch: pytest.MonkeyPatch, model: Path, versions: list[AdapterRef | None], alone: list[list[int]]
) -> None:
    share_kv(monkeypatch)
    assert ask(model, versions, together=True) != alone


def test_the_check_notices_reuse_across_versions_of_one_name(
    model: Path, versions: list[AdapterRef | None], alone: list[list[int]]
) -> None:
    by_name = [v and msgspec.structs.replace(v, digest=AdapterDigest(v.name)) for v in versions]
    assert ask(model, by_name, together=True) != alone


def test_scripted_executor_refuses_kv_reuse_across_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    share_kv(monkeypatch)
    engine = Bench().engine  # driven by hand: the bench counts blocks after every step, which fails first
    run(engine, [request("one", list(range(12)), adapter=adapter("a"))])
    with pytest.raises(ExecutorError, match=r"two: block .* holds other KV than token 0's"):
        run(engine, [request("two", list(range(12)), adapter=adapter("b"))])


def test_salt_gives_keys_that_no_version_has() -> None:
    digest = AdapterDigest("ab" * 32)
    roots = [(None, ""), (digest, ""), (None, digest), (None, "x"), (digest, "x"), (None, f"{digest}\0x")]
    keys = [key for version, salt in roots for key in block_keys(version, PROMPT, 16, salt=salt)]
    assert len(set(keys)) == len(keys) == 2 * len(roots)
    known = block_keys(digest, PROMPT, 16, salt="x")
    assert block_keys(digest, PROMPT, 16, known[:1], salt="x") == known
