"""The command ``lorikeet`` before its modules are imported."""

import sys
from types import ModuleType

import pytest

from lorikeet.cli import main


class Interrupted(ModuleType):
    """Stands for a module during whose import the user presses Ctrl-C."""

    def __getattr__(self, name: str) -> object:
        raise KeyboardInterrupt


def test_an_interrupt_during_the_imports_ends_the_command_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = list[bool]()
    monkeypatch.setitem(sys.modules, "lorikeet.cli.app", Interrupted("lorikeet.cli.app"))
    monkeypatch.setattr(sys, "argv", ["lorikeet", "plan"])
    monkeypatch.setattr(main, "close_first_host", lambda: closed.append(True))
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 130
    assert closed == [True]
