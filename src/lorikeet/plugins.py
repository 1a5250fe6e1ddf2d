"""Finds policies and other plug-ins by name, in Lorikeet's distribution and in other packages.

Each kind of plug-in has a group of Python entry points, such as ``lorikeet.eviction``. A package adds a policy with one
line in its ``pyproject.toml``; docs/plugins.md shows a whole package. Nothing is imported before its name is used.
"""

import inspect
import re
import tomllib
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from lorikeet.config import ConfigError, convert
from lorikeet.core.text import DISTRIBUTION, unknown_name

T = TypeVar("T")

_PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
_VALUE = re.compile(r"(?P<name>[^()]+)(?:\((?P<parameters>.*)\))?", re.DOTALL)


class Plugin(NamedTuple):
    """A plug-in that a package offers.

    Attributes:
        group: group of entry points.
        name: name in the group.
        target: module and attribute, as ``package.module:Class``.
        package: name and version of the distribution.
    """

    group: str
    name: str
    target: str
    package: str

    def load(self, kind: str) -> Any:
        """Import the plug-in.

        Args:
            kind: kind of plug-in, for the error message.

        Raises:
            ConfigError: the plug-in cannot be imported. The message names its package and entry point.
        """
        module, _, attribute = self.target.partition(":")
        try:
            found: Any = import_module(module)
            for each in attribute.split("."):
                found = getattr(found, each)
        except Exception as error:  # A package may raise any exception while it is imported.
            raise ConfigError(f"{kind} {self} cannot be imported: {type(error).__name__}: {error}") from error
        return found

    def __str__(self) -> str:
        """Return name, package and entry point."""
        return f"{self.name!r} of package {self.package} (entry point {self.group}: {self.name} = {self.target})"


def names(group: str) -> list[str]:
    """Return the names in a group of entry points, with Lorikeet's distribution first."""
    return list(dict.fromkeys([*_own(group), *_others(group)]))


def find(group: str, name: str, kind: str) -> Plugin | None:
    """Return the plug-in with this name; None for an unknown name.

    Lorikeet's distribution comes first, so that other packages cannot replace its names.

    Args:
        group: group of entry points.
        name: name in the group.
        kind: kind of plug-in, for the error message.

    Raises:
        ConfigError: two packages offer the name.
    """
    own = _own(group).get(name)
    if own is not None:
        return own
    found = _others(group).get(name, ())
    if len(found) > 1:
        raise ConfigError(
            f"{kind} {name!r} is offered twice, uninstall one package: {'; '.join(sorted(map(str, found)))}"
        )
    return found[0] if found else None


class PolicyRegistry(Mapping[str, Callable[..., T]], Generic[T]):
    """Finds the policies of one kind by name, and reads their parameters.

    A value names a policy and may set parameters: ``dlora(patience=64)``. The keyword-only arguments of a class's
    constructor are its parameters, and their annotations the types. As a mapping, its keys are names without
    parameters, and its items are functions that create the policy of a value.

    Args:
        group: group of entry points.
        kind: kind of policy, for error messages.
        own: the product's policies, as classes or as ``module:Class``.
        constructor: class method that creates a policy; empty for the class itself.

    Attributes:
        group, kind, own: the arguments.
    """

    def __init__(self, group: str, kind: str, own: dict[str, str | type[T]], constructor: str = "") -> None:
        self.group = group
        self.kind = kind
        self.own = own
        self._constructor = constructor

    def __getitem__(self, value: str) -> Callable[..., T]:
        """Return the function that creates the policy of a value, with the value's parameters bound.

        Raises:
            ConfigError: the policy or a parameter does not exist, or the policy cannot be imported.
        """
        return self.bind(value, self._constructor)

    def bind(self, value: str, method: str = "") -> Callable[..., Any]:
        """Return a class method of the policy, or the class, with the parameters of the value bound.

        Raises:
            ConfigError: see :meth:`__getitem__`.
        """
        found, parameters = self._load(value)
        function: Callable[..., Any] = getattr(found, method) if method else found
        return partial(function, **parameters) if parameters else function

    def load(self, value: str) -> type[T]:
        """Return the class of the policy, for its attributes.

        Raises:
            ConfigError: see :meth:`__getitem__`.
        """
        return self._load(value)[0]

    def __contains__(self, value: object) -> bool:
        """Return whether a policy has this name."""
        name = value.partition("(")[0].strip() if isinstance(value, str) else ""
        return name in self.own or name in names(self.group)

    def __iter__(self) -> Iterator[str]:
        """Return the names of all policies, the product's policies first."""
        return iter(dict.fromkeys([*self.own, *names(self.group)]))

    def __len__(self) -> int:
        """Return the number of policies."""
        return sum(1 for _ in self)

    def parameters(self, value: str) -> dict[str, Any]:
        """Return the parameters of a policy with their defaults.

        Raises:
            ConfigError: see :meth:`__getitem__`.
        """
        return {each.name: each.default for each in _keyword_only(self.load(value))}

    def _load(self, value: str) -> tuple[type[T], dict[str, Any]]:
        where = f"{self.kind} {value!r}"
        match = _VALUE.fullmatch(value.strip())
        if match is None:
            raise ConfigError(f"{where}: expected NAME or NAME(PARAMETER=VALUE,...)")
        found = self._class(match["name"].strip(), value)
        if match["parameters"] is None:
            return found, {}
        return found, _parameters(found, match["parameters"], where)

    def _class(self, name: str, value: str) -> type[T]:
        found = self.own.get(name)
        if isinstance(found, str):
            return typing.cast("type[T]", Plugin(self.group, name, found, DISTRIBUTION).load(self.kind))
        if found is not None:
            return found
        plugin = find(self.group, name, self.kind)
        if plugin is not None:
            return typing.cast("type[T]", plugin.load(self.kind))
        raise ConfigError(self._unknown(name, value))

    def _unknown(self, name: str, value: str) -> str:
        """Return the error for an unknown name. Variants behind a colon have become parameters."""
        base = name.partition(":")[0]
        if base != name and base in self and (parameters := self.parameters(base)):
            listed = ",".join(f"{key}={_shown(default)}" for key, default in parameters.items())
            return f"unknown {self.kind} {value!r}; {base} has parameters, with these defaults: {base}({listed})"
        return unknown_name(self.kind, value, list(self))


def split_options(text: str) -> list[str]:
    """Split a text at the commas outside of brackets, and strip the parts."""
    parts, depth, begin = [], 0, 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append(text[begin:place].strip())
            begin = place + 1
    return [*parts, text[begin:].strip()]


def _keyword_only(found: type) -> list[inspect.Parameter]:
    signature = inspect.signature(found.__init__)  # type: ignore[misc]  # of a class, not of an instance
    return [each for each in signature.parameters.values() if each.kind is inspect.Parameter.KEYWORD_ONLY]


def _parameters(found: type, text: str, where: str) -> dict[str, Any]:
    """Return the parameters in a text such as ``patience=64,tuned=false``, as arguments of the class's constructor.

    Raises:
        ConfigError: a parameter does not exist or has a wrong value.
    """
    known = {each.name: each for each in _keyword_only(found)}
    given: dict[str, str] = {}
    for part in filter(None, split_options(text)):
        key, equals, given_value = (each.strip() for each in part.partition("="))
        if not known:
            raise ConfigError(f"{where}: the policy has no parameters")
        if key not in known or not equals:
            raise ConfigError(f"{where}: {unknown_name('parameter', key, list(known))}")
        given[key] = given_value
    hints = typing.get_type_hints(found.__init__)  # type: ignore[misc]
    fields = [(key, hints.get(key, str)) for key in given]
    struct = msgspec.defstruct("Parameters", fields)
    values: dict[str, Any] = msgspec.structs.asdict(convert(given, struct, where))
    return values


def _shown(default: Any) -> str:
    return str(default).lower() if isinstance(default, bool) else str(default)


@cache
def _own_groups() -> dict[str, dict[str, str]]:
    """Return the entry points of Lorikeet's distribution: from the source tree, or else from the installed package."""
    if _PYPROJECT.is_file():
        project = tomllib.loads(_PYPROJECT.read_text()).get("project", {})
        if project.get("name") == DISTRIBUTION:
            groups: dict[str, dict[str, str]] = project.get("entry-points", {})
            return groups
    found: dict[str, dict[str, str]] = {}
    try:
        entry_points = metadata.distribution(DISTRIBUTION).entry_points
    except metadata.PackageNotFoundError:
        return found
    for each in entry_points:
        found.setdefault(each.group, {})[each.name] = each.value
    return found


@cache
def _own(group: str) -> dict[str, Plugin]:
    package = DISTRIBUTION
    return {name: Plugin(group, name, target, package) for name, target in _own_groups().get(group, {}).items()}


@cache
def _others(group: str) -> dict[str, tuple[Plugin, ...]]:
    """Return the plug-ins of all other packages by name. A name has several plug-ins if several packages offer it."""
    found: dict[str, tuple[Plugin, ...]] = {}
    for each in metadata.entry_points(group=group):
        dist = each.dist
        package = "unknown" if dist is None else f"{dist.name} {dist.version}"
        if dist is None or dist.name != DISTRIBUTION:
            found[each.name] = (*found.get(each.name, ()), Plugin(group, each.name, each.value, package))
    return found
