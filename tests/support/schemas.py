"""Random JSON schemas and regular expressions, and schemas that packages of the package index ship."""

import json
import random
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

Schema = dict[str, Any]

_PATTERNS = ("^[a-z]{2,5}$", "^\\d+-\\d+$", "^(on|off)$", "^x[0-9a-f]*$", "^[A-Z][a-z]+( [A-Z][a-z]+)?$")
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")


def random_schema(choose: random.Random, depth: int = 3) -> Schema:
    """Return a schema of a JSON object, which may refer to definitions."""
    schema = _object(choose, depth)
    if choose.random() < 0.3:
        schema["$defs"] = {"part": _any(choose, 1)}
        schema["properties"]["part"] = {"$ref": "#/$defs/part"}
        schema["required"] = [*schema["required"], "part"]
    return schema


def patterned_schema(choose: random.Random, depth: int = 2) -> Schema:
    """Return a schema of an object whose properties may match its patterns of properties."""
    schema = _object(choose, depth)
    names = [*schema["properties"], "score", "a"]
    patterns = [f"^{choose.choice(names)}$", f"^({'|'.join(names[:2])})$", "^s", "^x-", ".", "e$"]
    chosen = choose.sample([each for each in patterns if "$id" not in each], choose.randint(1, 2))
    schema["patternProperties"] = {pattern: _any(choose, 0) for pattern in chosen}
    if choose.random() < 0.5:  # both say the same, as generators of schemas write it
        for pattern in chosen:
            name = pattern.strip("^$")
            if name in schema["properties"]:
                schema["properties"][name] = schema["patternProperties"][pattern]
    return schema


def hard_schema(choose: random.Random) -> Schema:
    """Return a schema of what has gone wrong in parsers of grammars."""
    special = choose.choice(["<|im_end|>", "<|im_start|>x", "a<|im_end|>b", "</s>", "🦜", "\\u0041", '"'])
    match choose.randrange(6):
        case 0:
            return patterned_schema(choose)
        case 1:
            return {"const": special}
        case 2:
            return {"enum": [special, special + "x", 1]}
        case 3:
            inner = {"$ref": "#"} if choose.random() < 0.3 else {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
            return {"type": "object", "properties": {"n": inner}, "required": ["n"], "additionalProperties": False}
        case 4:
            return {"type": "object", "properties": {special: _any(choose, 1)}, "required": [special]}
        case _:
            return {"allOf": [random_schema(choose, 1), patterned_schema(choose, 1)]}


def _any(choose: random.Random, depth: int) -> Schema:
    leaves = (_string, _integer, _number, _choice, lambda *_: {"type": choose.choice(["boolean", "null"])})
    inner = (_object, _array, _alternatives, *leaves)
    return choose.choice(inner if depth else leaves)(choose, depth - 1)


def _object(choose: random.Random, depth: int) -> Schema:
    names = choose.sample(["name", "age", "tags", "a b", "größe", "$id", "x"], choose.randint(0, 4))
    schema: Schema = {"type": "object", "properties": {name: _any(choose, depth) for name in names}}
    schema["required"] = [name for name in names if choose.random() < 0.7]
    match choose.randrange(4):
        case 0:
            schema["additionalProperties"] = _any(choose, 0)
        case 1:
            pass
        case _:
            schema["additionalProperties"] = False
    return schema


def _array(choose: random.Random, depth: int) -> Schema:
    least = choose.randint(0, 2)
    schema: Schema = {"type": "array", "minItems": least, "maxItems": least + choose.randint(0, 3)}
    if choose.random() < 0.3:
        schema["prefixItems"] = [_any(choose, depth) for _ in range(2)]
    schema["items"] = False if "prefixItems" in schema and least <= 2 and choose.random() < 0.3 else _any(choose, depth)
    return schema


def _alternatives(choose: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(choose, depth) for _ in range(choose.randint(1, 3))]}


def _string(choose: random.Random, depth: int) -> Schema:
    match choose.randrange(4):
        case 0:
            return {"type": "string", "pattern": choose.choice(_PATTERNS)}
        case 1:
            least = choose.randint(0, 4)
            return {"type": "string", "minLength": least, "maxLength": least + choose.randint(0, 8)}
        case 2:
            return {"type": "string", "format": choose.choice(_FORMATS)}
        case _:
            return {"type": "string", "maxLength": 20}


def _integer(choose: random.Random, depth: int) -> Schema:
    low = choose.randint(-1000, 1000)
    bounds = {"minimum": low, "maximum": low + choose.randint(0, 2000)} if choose.random() < 0.7 else {}
    return {"type": "integer", **bounds}


def _number(choose: random.Random, depth: int) -> Schema:
    low = round(choose.uniform(-5, 5), 2)
    bounds = {"exclusiveMinimum": low, "maximum": round(low + choose.randint(1, 9), 2)} if choose.random() < 0.5 else {}
    return {"type": "number", **bounds}


def _choice(choose: random.Random, depth: int) -> Schema:
    values = [1, "two", 3.5, None, True, "ü", {"k": [1, 2]}]
    return choose.choice([{"enum": choose.sample(values, choose.randint(1, 4))}, {"const": choose.choice(values)}])


def random_regex(choose: random.Random, depth: int = 3) -> str:
    """Return a regular expression in the syntax that Python's and Rust's engines share."""
    if not depth:
        return choose.choice(["a", "bc", r"\d", "[a-f]", "[^x]", r"\.", r"\w", "é", "(on|off)", r"\s"])
    parts = [random_regex(choose, depth - 1) for _ in range(choose.randint(1, 3))]
    match choose.randrange(4):
        case 0:
            return f"({'|'.join(parts)})"
        case 1:
            return f"({''.join(parts)}){choose.choice(['?', '{2}', '{1,3}', '{0,2}'])}"
        case _:
            return "".join(parts)


def published_schemas() -> list[Schema]:
    """Return the schemas inside newer drafts of JSON Schema and inside those of the build tools, smallest first."""
    drafts = files("jsonschema_specifications").joinpath("schemas")
    newer = (drafts.joinpath("draft7"), drafts.joinpath("draft201909"), drafts.joinpath("draft202012"))
    found: dict[str, Schema] = {}
    for folder in (*newer, files("setuptools").joinpath("config")):
        for file in _files(folder):
            text = file.read_text(encoding="utf-8")
            if text.startswith("{"):
                for schema in _within(json.loads(text)):
                    found[json.dumps(schema, sort_keys=True)] = schema
    return [found[text] for text in sorted(found, key=lambda text: (len(text), text))]


def _files(folder: Traversable) -> Iterator[Traversable]:
    for each in folder.iterdir():
        if each.is_dir():
            yield from _files(each)
        elif not each.name.endswith((".py", ".pyc")):
            yield each


def _within(value: Any) -> Iterator[Schema]:
    """Yield every schema in a document that says of what type it describes, and refers to nothing."""
    if isinstance(value, dict):
        text = json.dumps(value)
        if isinstance(value.get("type"), str) and not any(word in text for word in ('"$ref"', '"$dyn', '"$rec')):
            yield value
        for each in value.values():
            yield from _within(each)
    elif isinstance(value, list):
        for each in value:
            yield from _within(each)
