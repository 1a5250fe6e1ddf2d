"""Reads prompts as embeddings from tensors of ``torch.save``, without torch and without running a pickle.

A pickle is a program, and can do anything. This module reads its instructions one by one, and accepts only the
instructions that ``torch.save`` writes for one tensor: they build tuples, and name a storage and a known function.
"""

import base64
import binascii
import io
import pickletools
import zipfile
from typing import Any

import numpy as np

from lorikeet.core.request import PromptEmbeds
from lorikeet.http.errors import ApiError, bad_request

FIELD = "prompt_embeds"
_MAX_PICKLE_BYTES = 4096
_MAX_OPCODES = 256
_MAX_ENTRIES = 16
_DTYPES = {"FloatStorage": ("float32", 4), "HalfStorage": ("float16", 2), "BFloat16Storage": ("bfloat16", 2)}
_REBUILD = "torch._utils _rebuild_tensor_v2"
_ORDERED = "collections OrderedDict"
_GLOBALS = {_REBUILD, _ORDERED, *(f"torch {name}" for name in _DTYPES)}
_EXPONENT = {"float32": (np.uint32, 0x7F800000), "float16": (np.uint16, 0x7C00), "bfloat16": (np.uint16, 0x7F80)}
"""Bits of the exponent, by dtype, which are all set in numbers that are not finite."""
_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE"}
_IGNORED = {"PROTO", "BINPUT", "LONG_BINPUT", "MEMOIZE", "FRAME"}
_MARK = object()


class _NotATensor(ValueError):
    """Reports bytes that are not a tensor of ``torch.save``, with the reason."""


def read_prompt_embeds(field: str | list[str], hidden: int, longest_tokens: int) -> list[PromptEmbeds]:
    """Return the prompts in a body's ``prompt_embeds``.

    Args:
        field: one tensor or several, each in base64.
        hidden: size of the model's embeddings; 0 for a model that takes only token ids.
        longest_tokens: most tokens of a prompt.

    Raises:
        ApiError: 400, a tensor is not ``[tokens, hidden]`` of finite floats, or the model takes only token ids.
    """
    if not hidden:
        raise bad_request(f"{FIELD}: this model takes only token ids.", FIELD)
    several = isinstance(field, list)
    return [
        _read(text, f"{FIELD}.{at}" if several else FIELD, hidden, longest_tokens)
        for at, text in enumerate(field if isinstance(field, list) else [field])
    ]


def token_count(embeds: PromptEmbeds, hidden: int) -> int:
    """Return the number of tokens of a prompt of embeddings."""
    return len(embeds.data) // (hidden * (4 if embeds.dtype == "float32" else 2))


def _read(text: str, where: str, hidden: int, longest_tokens: int) -> PromptEmbeds:
    try:
        embeds, shape = _tensor(base64.b64decode(text, validate=True))
    except (binascii.Error, _NotATensor, zipfile.BadZipFile, ValueError, KeyError, IndexError, EOFError) as error:
        raise _wrong(where, f"not a tensor that torch.save wrote, in base64: {error}") from error
    if len(shape) == 3 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) != 2 or shape[1] != hidden or not 1 <= shape[0] < longest_tokens:
        wanted = f"[tokens, {hidden}], of 1 to {longest_tokens - 1} tokens"
        raise _wrong(where, f"has the shape {list(shape)}; it must be {wanted}")
    kind, exponent = _EXPONENT[embeds.dtype]
    if bool(((np.frombuffer(embeds.data, kind) & exponent) == exponent).any()):
        raise _wrong(where, "has numbers that are not finite")
    return embeds


def _wrong(where: str, why: str) -> ApiError:
    return bad_request(f"{where}: {why}.", FIELD)


def _tensor(content: bytes) -> tuple[PromptEmbeds, tuple[int, ...]]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
        if len(entries) > _MAX_ENTRIES or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise _NotATensor("the archive has compressed entries, or too many")
        names = [entry.filename for entry in entries]
        root = next((name.removesuffix("data.pkl") for name in names if name.endswith("/data.pkl")), None)
        if root is None or archive.getinfo(f"{root}data.pkl").file_size > _MAX_PICKLE_BYTES:
            raise _NotATensor("the archive lacks data.pkl, or data.pkl is too large")
        if f"{root}byteorder" in names and archive.read(f"{root}byteorder") != b"little":
            raise _NotATensor("the byte order is not little-endian")
        dtype, width, key, numbers, shape = _described(archive.read(f"{root}data.pkl"))
        data = archive.read(f"{root}data/{key}")
    size = 1
    for length in shape:
        size *= length
    if len(data) != numbers * width or size != numbers:
        raise _NotATensor("the storage and the tensor differ in size: save a copy (tensor.clone())")
    return PromptEmbeds(dtype, data), shape


def _described(pickle: bytes) -> tuple[str, int, str, int, tuple[int, ...]]:
    """Return a tensor's dtype, bytes of a number, name and length of the storage, and shape."""
    result = _built(pickle)
    match result:
        case ("call", _, (("storage", kind, key, numbers), 0, tuple(shape), tuple(stride), *_)):
            pass
        case _:
            raise _NotATensor("the pickle describes something else")
    plain = 1
    for length, step in zip(reversed(shape), reversed(stride), strict=True):
        if not (isinstance(length, int) and 0 < length < 2**31) or step != plain:
            raise _NotATensor("the tensor is a view, or empty: save a copy (tensor.contiguous().clone())")
        plain *= length
    dtype, width = _DTYPES[kind]
    return dtype, width, key, numbers, shape


def _built(pickle: bytes) -> Any:
    """Return the value of a pickle of tuples, numbers, texts and the two known calls."""
    stack: list[Any] = []
    for count, (opcode, argument, _) in enumerate(pickletools.genops(pickle)):
        name = opcode.name
        if count > _MAX_OPCODES:
            raise _NotATensor("the pickle is too long")
        if name == "STOP":
            (result,) = stack
            return result
        if name in _IGNORED:
            continue
        if name in _VALUES:
            stack.append(argument)
        elif name == "GLOBAL" and argument in _GLOBALS:
            stack.append(("global", argument))
        elif name in ("NEWFALSE", "NEWTRUE"):
            stack.append(name == "NEWTRUE")
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "EMPTY_TUPLE":
            stack.append(())
        elif name in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
            begin = len(stack) - int(name[5:]) if name[5:] else _last_mark(stack)
            values = tuple(stack[begin:])
            del stack[begin if name[5:] else begin - 1 :]
            stack.append(values)
        elif name == "BINPERSID":
            stack.append(_storage(stack.pop()))
        elif name == "REDUCE":
            arguments = stack.pop()
            function = stack.pop()
            if function == ("global", _ORDERED) and arguments == ():
                stack.append({})
            elif function == ("global", _REBUILD):
                stack.append(("call", _REBUILD, arguments))
            else:
                raise _NotATensor("the pickle calls an unknown function")
        else:
            raise _NotATensor(f"the pickle has {name} {str(argument)[:60]!r}")
    raise _NotATensor("the pickle has no end")


def _last_mark(stack: list[Any]) -> int:
    at = max(index for index, value in enumerate(stack) if value is _MARK)
    return at + 1


def _storage(described: Any) -> tuple[str, str, str, int]:
    match described:
        case ("storage", ("global", str(name)), str(key), str(), int(numbers)) if key.isalnum():
            return "storage", name.removeprefix("torch "), key, numbers
    raise _NotATensor("the pickle describes its storage in another way")
