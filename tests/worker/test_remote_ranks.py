"""Ranks that ``lorikeet rank`` starts, on the same machine and in another network namespace."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from lorikeet.core.executor import ExecutorError
from lorikeet.worker.remote_ranks import RemoteRankError, _authenticated, read_key
from tests.support import sampling
from tests.support.driver import driving
from tests.worker.rank_runs import make_model, run_everything

pytestmark = pytest.mark.slow

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
KEY = "a key that only both machines know"
TIMEOUT_S = 60.0
COMMAND = [sys.executable, "-c", "from lorikeet.cli.main import main; main()", "rank"]


@pytest.fixture(autouse=True)
def own_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test's ranks choose their interface, which they keep in the environment: here all are of one process."""
    for name in INTERFACES:
        monkeypatch.setenv(name, "")  # so that what is there is there again afterwards
        monkeypatch.delenv(name)


@contextmanager
def rank_at(address: str, key: Path, prefix: Sequence[str] = ()) -> "Iterator[subprocess.Popen[str]]":
    """Run the command until the end of the context."""
    command = [*prefix, *COMMAND, address, "--rank-key-file", str(key)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server(("", 0)) as free:
        return int(free.getsockname()[1])


def key_file(folder: Path, key: str = KEY) -> Path:
    """Write a key."""
    file = folder / f"{len(key)}.key"
    file.write_text(f"{key}\n")
    return file


def test_ranks_of_another_process_give_the_tokens_of_one_and_join_again(tmp_path: Path) -> None:
    folder, adapters = make_model(tmp_path, num_hidden_layers=4)
    key = key_file(tmp_path)
    address = f"127.0.0.1:{free_port()}"
    with driving(folder) as alone:
        expected = run_everything(alone, adapters)
    remote = {"rank_address": address, "rank_key_file": str(key)}
    with rank_at(address, key):
        with driving(folder, tensor_parallel=2, **remote) as together:
            assert run_everything(together, adapters) == expected
        with driving(folder, pipeline_parallel=2, **remote) as together:
            assert run_everything(together, adapters) == expected


def test_a_remote_rank_that_dies_is_an_error(tmp_path: Path) -> None:
    folder, _ = make_model(tmp_path)
    key = key_file(tmp_path)
    address = f"127.0.0.1:{free_port()}"
    remote = {"rank_address": address, "rank_key_file": str(key)}
    with rank_at(address, key) as process, driving(folder, tensor_parallel=2, **remote) as driver:
        process.kill()
        driver.executor.wait_for_transfer(60.0)
        with pytest.raises(ExecutorError, match="rank 1 has died"):
            driver.executor.completed_transfers()


@pytest.mark.parametrize("other_key", [KEY, "another key"])
def test_both_ends_refuse_another_key(other_key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        rank = socket.create_connection(listener.getsockname())
        engine, _ = listener.accept()
        ends = [
            pool.submit(_authenticated, engine, KEY.encode(), answers_first=False),
            pool.submit(_authenticated, rank, other_key.encode(), answers_first=True),
        ]
        connections = [end.result() for end in ends]
    assert [connection is not None for connection in connections] == [other_key == KEY] * 2
    for connection in connections:
        if connection is not None:
            connection.close()


def test_a_rank_ends_when_the_engine_sends_no_challenge(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT_S)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with rank_at(address, key_file(tmp_path)) as process:
            accepted, _ = listener.accept()
            with accepted:
                accepted.sendall(b"\0\0\0\4what")  # no challenge
                _, said = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, said) == (2, f"error: the engine at {address} has another key\n")


def test_a_key_that_is_missing_or_short_is_an_error(tmp_path: Path) -> None:
    for file, why in ((key_file(tmp_path, "short"), "at least 16 bytes"), (tmp_path / "none", "No such file")):
        with pytest.raises(RemoteRankError, match=why):
            read_key(str(file))


@contextmanager
def other_machine() -> "Iterator[tuple[str, list[str]]]":
    """Make a network namespace; yield this side's address, and what runs a command in the other."""
    name = f"lk{os.getpid() % 100_000}"
    own = f"{name}a"
    net = f"10.213.{os.getpid() % 250}"
    steps = [
        f"ip netns add {name}",
        f"ip link add {own} type veth peer name eth0 netns {name}",
        f"ip addr add {net}.1/30 dev {own}",
        f"ip link set {own} up",
        f"ip -n {name} addr add {net}.2/30 dev eth0",
        f"ip -n {name} link set eth0 up",
    ]
    if shutil.which("ip") is None or os.geteuid():
        pytest.skip("network namespaces need root and iproute2")
    try:
        for number, step in enumerate(steps):
            if subprocess.run(step.split(), capture_output=True, check=False).returncode:
                pytest.skip(f"step {number} of a network namespace is not permitted here")
        yield f"{net}.1", ["ip", "netns", "exec", name]
    finally:
        subprocess.run(["ip", "link", "del", own], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


if sampling.runs_all:  # it needs root, iproute2 and leave to make network namespaces

    @pytest.mark.parametrize("split", ["tensor_parallel", "pipeline_parallel"])
    def test_a_rank_on_another_machine_gives_the_tokens_of_one(tmp_path: Path, split: str) -> None:
        folder, adapters = make_model(tmp_path, num_hidden_layers=4)
        key = key_file(tmp_path)
        with driving(folder) as alone:
            expected = run_everything(alone, adapters)
        with other_machine() as (host, there):
            address = f"{host}:{free_port()}"
            remote = {"rank_address": address, "rank_key_file": str(key)}
            with rank_at(address, key, there), driving(folder, **{split: 2}, **remote) as together:
                assert run_everything(together, adapters) == expected
