"""References to modules and names in docstrings and comments, which must lead to something that exists."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec

from lorikeet.config import Settings

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "lorikeet"
FILES = sorted(SOURCE.rglob("*.py"))
FOLDERS = {path.name for path in SOURCE.iterdir() if path.is_dir() or path.suffix == ".py"}
PACKAGES = {name.removesuffix(".py") for name in FOLDERS if not name.startswith("_")}
DOTTED = re.compile(rf"(?<![\w./:-])(lorikeet\.)?((?:{'|'.join(sorted(PACKAGES))})(?:\.[A-Za-z_]\w*)+)(?![\w/-])")
ROLE = re.compile(r":(?:func|class|meth|attr|data):`~?([\w.]+)`")
PATH = re.compile(
    rf"(?<![\w./-])((?:native|docs|tests|benchmarks|{'|'.join(sorted(PACKAGES))})/[\w./-]+\.(?:py|md|h|cpp))"
)
FILE_ENDINGS = {"json", "py", "toml", "md", "jsonl"}


@cache
def names_of(module: tuple[str, ...]) -> dict[str, ast.AST] | None:
    """Return the names at the top of a module, with their definitions; None if there is no such module."""
    folder = SOURCE.joinpath(*module)
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    if not file.is_file():
        return None
    return {name: node for node in ast.parse(file.read_text()).body for name in bound_names(node)}


def bound_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement binds, those inside its branches included."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
        return
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names)
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            yield each.id
        elif each is not node and isinstance(each, ast.FunctionDef | ast.ClassDef):
            yield each.name


def members_of(node: ast.ClassDef) -> set[str]:
    """Return the attributes and methods of a class, with those that its methods assign."""
    found = {name for child in node.body for name in bound_names(child)}
    return found | {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


def leads_to_something(path: list[str]) -> bool:
    """Return whether a dotted path below ``lorikeet`` is a module, or a name in one."""
    for count in range(len(path), 0, -1):
        names = names_of(tuple(path[:count]))
        if names is None:
            continue
        rest = path[count:]
        if not rest:
            return True
        node = names.get(rest[0])
        if node is None or len(rest) == 1:
            return node is not None
        return not isinstance(node, ast.ClassDef) or bool(node.bases) or rest[1] in members_of(node)
    return False


def settings_keys() -> set[str]:
    """Return the keys of settings, such as ``engine.device``, which look like references."""
    found = set()
    for section in msgspec.structs.fields(Settings):
        if isinstance(section.type, type) and issubclass(section.type, msgspec.Struct):
            found |= {f"{section.name}.{field.name}" for field in msgspec.structs.fields(section.type)}
    return found


def prose(file: Path) -> Iterator[str]:
    """Yield the docstrings and comments of a file."""
    text = file.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def test_dotted_references_in_docstrings_and_comments_exist() -> None:
    keys = settings_keys()
    dangling = [
        f"{file.relative_to(SOURCE)}: {match.group(0)}"
        for file in FILES
        for text in prose(file)
        for match in DOTTED.finditer(text)
        if match.group(2) not in keys
        and match.group(2).rpartition(".")[2] not in FILE_ENDINGS
        and not leads_to_something(match.group(2).split("."))
    ]
    assert not dangling, "\n".join(dangling)


@cache
def words_of(file: Path) -> frozenset[str]:
    """Return the words of a file, roles apart; none of a folder."""
    return frozenset(re.findall(r"\w+", ROLE.sub("", file.read_text()))) if file.is_file() else frozenset()


def words_near(file: Path) -> frozenset[str]:
    """Return the words of a file, and of the modules of ours that it imports from."""
    found = words_of(file)
    for module in re.findall(r"^from lorikeet\.([\w.]+) import", file.read_text(), re.MULTILINE):
        found = found | words_of(SOURCE.joinpath(*module.split(".")).with_suffix(".py"))
    return found


def test_roles_in_docstrings_name_something_in_reach() -> None:
    dangling = []
    for file in FILES:
        targets = ROLE.findall(file.read_text())
        words = words_near(file) if targets else frozenset()
        for target in targets:
            parts = target.removeprefix("lorikeet.").split(".")
            exists = leads_to_something(parts) if parts[0] in PACKAGES else words.issuperset(parts)
            if not exists:
                dangling.append(f"{file.relative_to(SOURCE)}: {target}")
    assert not dangling, "\n".join(dangling)


def test_files_named_in_sources_exist() -> None:
    missing = [
        f"{file.relative_to(ROOT)}: {path}"
        for file in [*FILES, *sorted((ROOT / "native").iterdir())]
        for path in PATH.findall(file.read_text())
        if not (ROOT / path).is_file() and not (SOURCE / path).is_file()
    ]
    assert not missing, "\n".join(missing)
