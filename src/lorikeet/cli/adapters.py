"""``lorikeet adapters``: manages the adapters of a running server, and inspects, converts and merges folders."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer
from rich.table import Table

from lorikeet.cli.console import JsonFile, check_json_file, fail, given_options, output, write_json
from lorikeet.cli.http_client import DEFAULT_URL, ApiKey, ServerClient, Url
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.text import format_size

if TYPE_CHECKING:
    from lorikeet.adapters.description import AdapterDescription

app = typer.Typer(help="List, add, remove, inspect and convert adapters.", no_args_is_help=True)

_PAGE = 1000
_MOST_SHOWN = 20
"""Most names of tensors in a line."""


@app.command("list")
def list_adapters(url: Url = DEFAULT_URL, api_key: ApiKey = None, json_file: JsonFile = None) -> None:
    """List the adapters of a running server."""
    check_json_file(json_file)
    api = ServerClient(url, api_key)
    cards: list[dict[str, Any]] = []
    left_out: list[dict[str, str]] = []
    cursor: str | None = ""
    while cursor is not None:
        page = api.get("/v1/adapters", limit=_PAGE, cursor=cursor)
        cards += page["data"]
        left_out += page.get("left_out", [])
        cursor = page["next_cursor"]
    if not write_json(json_file, cards):
        return
    table = Table("name", "rank", "size", "on device", "version", "source")
    for card in cards:
        if shares := card.get("versions"):
            parts = [f"{each} {share:g}" for each, share in shares.items()]
            parts += [f"{each} {share:g} (shadow)" for each, share in card["shadow"].items()]
            table.add_row(card["name"], "-", "-", "-", "split", ", ".join(parts))
            continue
        if not card["loaded"]:
            version = "cannot be loaded" if card.get("error") else "not loaded yet"
            table.add_row(card["name"], "-", "-", "-", version, card["source"])
            continue
        loaded = format_size(card["device_bytes"]) if card["device_bytes"] else "-"
        size = format_size(card["weight_bytes"])
        table.add_row(card["name"], str(card["rank"]), size, loaded, card["digest"][:12], card["source"])
    output().print(table)
    for card in cards:
        if card.get("error"):
            print(f"{card['name']} cannot be loaded: {card['error']}")
    for each in left_out:
        print(f"left out: {each['name']}: {each['reason']}")


@app.command("add")
def add_adapter(
    name: Annotated[str, typer.Argument(help="What clients will write in `model`.")],
    source: Annotated[str, typer.Argument(help="Folder below the server's --adapter-dir, or an allowed URL.")],
    replace: Annotated[bool, typer.Option("--replace", help="Let an existing name point to the new content.")] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Register an adapter on a running server."""
    body = {"name": name, "source": source, "replace": replace}
    card = ServerClient(url, api_key).post("/v1/adapters", body, {"set 'replace' to True": "add --replace"})
    for warning in card.get("warnings", ()):
        print(f"warning: {warning}", file=sys.stderr)
    print(f"added {card['name']}: rank {card['rank']}, {format_size(card['weight_bytes'])}, version {card['digest']}")


@app.command("remove")
def remove_adapter(
    name: Annotated[str, typer.Argument(help="The adapter's name.")], url: Url = DEFAULT_URL, api_key: ApiKey = None
) -> None:
    """Remove an adapter from a running server, once its running requests have ended."""
    answer = ServerClient(url, api_key).delete(f"/v1/adapters/{quote(name)}")
    freed = answer["freed_bytes"]
    print(f"removed {name}: " + (f"{format_size(freed)} freed" if freed is not None else "freed when its requests end"))
    for warning in answer.get("warnings", ()):
        print(f"warning: {warning}", file=sys.stderr)


@app.command("split")
def split_adapter(
    name: Annotated[str, typer.Argument(help="The name that clients write.")],
    versions: Annotated[list[str], typer.Argument(metavar="ADAPTER=SHARE...", help="Adapters with their shares.")],
    shadow: Annotated[
        list[str] | None,
        typer.Option(metavar="ADAPTER=SHARE", help="Adapter that gets copies; repeatable."),
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Split the requests of a name between adapters of a running server."""
    body = {"name": name, "versions": _shares(versions), "shadow": _shares(shadow or []), "replace": True}
    card = ServerClient(url, api_key).post("/v1/adapters", body)
    print(f"split {name}: " + ", ".join(f"{each} {share:g}" for each, share in card["versions"].items()))


@app.command("promote")
def promote_adapter(
    name: Annotated[str, typer.Argument(help="The name that clients write.")],
    version: Annotated[str, typer.Argument(help="The version or shadow that answers all of its requests from now on.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Give one version of a split, or its shadow, all requests."""
    api = ServerClient(url, api_key)
    card = api.get(f"/v1/adapters/{quote(name)}")
    shadow = card.get("shadow", {})
    versions = {**card.get("versions", {}), **shadow}
    if versions and version not in versions:  # Another name, perhaps a slip, would get all requests.
        fail(f"{version!r} is not a version of {name}, which has {', '.join(versions)}; `adapters split` adds one")
    shadow.pop(version, None)
    api.patch(f"/v1/adapters/{quote(name)}", {"versions": {version: 1.0}, "shadow": shadow})
    print(f"{name} is answered by {version}")


def _shares(pairs: Sequence[str]) -> dict[str, float]:
    shares = {}
    for pair in pairs:
        adapter, _, share = pair.rpartition("=")
        try:
            shares[adapter] = float(share)
        except ValueError:
            fail(f"{pair!r} must be of the form ADAPTER=SHARE, such as legal-v2=0.95")
    return shares


@app.command("verify")
def verify(
    name: Annotated[str, typer.Argument(help="The adapter's name.")],
    folder: Annotated[Path, typer.Argument(help="Folder with adapter_config.json.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    json_file: JsonFile = None,
) -> None:
    """Compare the adapter that a running server has with a folder; end with 1 if they differ, and list the tensors.

    `lorikeet.verification.compare_with_server` compares a live PEFT model by its forward pass.
    """
    from lorikeet.adapters.checkpoint import DescribeOptions
    from lorikeet.adapters.content import AdapterContent, compare, read_content
    from lorikeet.adapters.errors import AdapterError
    from lorikeet.adapters.reader import describe

    check_json_file(json_file)
    try:
        digest = describe(folder, DescribeOptions(read_weights=True)).digest
        own = read_content(folder)
    except AdapterError as error:
        fail(str(error))
    content = ServerClient(url, api_key).get(f"/v1/adapters/{quote(name)}/content")
    found = compare(AdapterContent(content["settings"], content["tensors"]), own)
    same = content["digest"] == digest or found.are_same
    answer = {"same": same, "digest": content["digest"], "folder_digest": digest, **found._asdict()}
    if write_json(json_file, answer):
        if same:
            print(f"{name}: the server has the {len(own.tensors)} tensors of {folder}, version {content['digest']}")
        for key, (there, here) in found.settings.items():
            print(f"{key}: {there!r} on the server, {here!r} in the folder")
        for names, text in (
            (found.differing, "differ"),
            (found.only_first, "only on the server"),
            (found.only_second, "only in the folder"),
        ):
            if names:
                rest = f", and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
                print(f"{len(names)} of {len(own.tensors)} tensors {text}: {', '.join(names[:_MOST_SHOWN])}{rest}")
    if not same:
        raise typer.Exit(1)


@app.command("inspect")
def inspect(
    folder: Annotated[Path, typer.Argument(help="Folder with adapter_config.json.")],
    json_file: JsonFile = None,
    check: Annotated[
        bool, typer.Option("--check", help="Also answer a prompt here and by PEFT, and compare. Needs peft.")
    ] = False,
    base: Annotated[
        str,
        typer.Option(
            help="Folder of the base that would serve it, or a hub id, or the default model's name, to check that it "
            "fits. Empty: that is not checked, and --check takes the default model."
        ),
    ] = "",
    prompt: Annotated[str, typer.Option(help="The prompt of --check.")] = "The capital of France is",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that --check computes.")] = 16,
) -> None:
    """Print the content of a PEFT folder, or the reason why it cannot be served. Needs no server."""
    from lorikeet.adapters.checkpoint import AdapterChecks, DescribeOptions
    from lorikeet.adapters.errors import AdapterError
    from lorikeet.adapters.reader import describe
    from lorikeet.cli import adapter_report

    check_json_file(json_file)
    base_folder = _base_folder(base) if base or check else None
    geometry, dtype = (None, "") if base_folder is None else _sizes(base_folder)
    try:
        found = describe(folder, DescribeOptions(geometry, AdapterChecks(dtype), read_weights=True, read_chat=True))
        fits = str(base_folder) if base_folder is not None and (geometry is not None or check) else ""
        description = adapter_report.describe(folder, found, fits)
        if base_folder is not None and check:
            description["check"] = _compare(folder, base_folder, prompt, tokens)
    except AdapterError as error:
        fail(str(error))
    if write_json(json_file, description):
        adapter_report.show(description)
    if check and not description["check"]["same"]:
        raise typer.Exit(1)


@app.command("convert")
def convert(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="Folder or file of the adapter.")],
    target: Annotated[Path, typer.Argument(help="Folder to write, which must not exist.")],
    base: Annotated[
        str, typer.Option(help="Folder of the adapter's base, or a hub id; empty for the default model.")
    ] = "",
    rank: Annotated[
        str,
        typer.Option(
            help="Largest rank of a module; `auto`: what --tolerance needs, while LoRA is smaller than the weight."
        ),
    ] = "auto",
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Largest error of a module, as a share of the change of its weight.")
    ] = 0.01,
    json_file: JsonFile = None,
) -> None:
    """Write a PEFT LoRA adapter for one of another type or program. Needs no server.

    PEFT loads its other types (LoHa, LoKr, OFT, VeRA, PiSSA, ...), which are split to the rank that --tolerance needs.
    Adapters of mlx, GGUF files, those with lora_up and lora_down, and LoRA in an adapter_model.bin are rewritten as
    they are.
    """
    from lorikeet.adapters.description import CONFIG_FILE
    from lorikeet.adapters.errors import AdapterError
    from lorikeet.adapters.folder_hints import PICKLED_FILE
    from lorikeet.adapters.peft_config import SERVED_TYPES, check_convertible
    from lorikeet.convert import folder as adapter_folder
    from lorikeet.convert import foreign as foreign_adapters

    check_json_file(json_file)
    if rank != "auto" and not (rank.isdecimal() and int(rank) > 0):
        fail(f"--rank {rank}: must be auto or a positive number", code=2)
    try:
        form = foreign_adapters.recognise(folder)
        if form is not None:
            _refuse_rank(context, form.name)
            modules = foreign_adapters.rewrite(form, target, _base_folder(base))
            if write_json(json_file, {"format": form.name, "modules": modules}):
                print(f"{target}: {form.name} rewritten as PEFT's LoRA on {len(modules)} modules, exactly")
            return
        kind = check_convertible(folder / CONFIG_FILE)
        if kind in SERVED_TYPES and adapter_folder.is_pickled(folder):
            _refuse_rank(context, PICKLED_FILE)
            number = adapter_folder.rewrite_pickled(folder, target)
            if write_json(json_file, {"format": PICKLED_FILE, "tensors": number}):
                print(f"{target}: {number} tensors rewritten as safetensors, exactly")
            return
        base_folder = _base_folder(base)
        served = _served(folder, base_folder)
        if served is not None and not served.extras:
            fail(
                f"{folder} is LoRA and served as it is; a copy would lose precision. For a lower rank: `lorikeet "
                "adapters compress FOLDER --into OUT --rank RANK`"
            )
        if served is not None:
            print(f"warning: {folder} is served as it is; converting it is not needed", file=sys.stderr)
        peft = _peft()
        print(f"converting {folder} over {base_folder}, which PEFT loads first …", file=sys.stderr)
        found = peft.convert(folder, target, base_folder, 0 if rank == "auto" else int(rank), tolerance)
    except AdapterError as error:
        fail(str(error))
    worst = max(found, key=lambda each: each.error)
    if write_json(json_file, {"modules": [each._asdict() for each in found], "error": worst.error}):
        where = f" ({worst.module})" if worst.error else ""
        print(f"{target}: LoRA of {_rank_range(found)} on {len(found)} modules; largest error {worst.error:.2g}{where}")
        sizes = sorted({size for each in found for size in each.at})
        errors = [f"{max(each.at.get(size, each.error) for each in found):.2g} at rank {size}" for size in sizes]
        if errors:
            print(f"smaller by --rank: errors would be {', '.join(errors)}")


@app.command("merge")
def merge(
    mixture: Annotated[str, typer.Argument(help="Folders with their weights, as in './a*0.7+./b*0.3', or one folder.")],
    target: Annotated[Path, typer.Argument(help="Folder to write, which must not exist.")],
    base: Annotated[
        str,
        typer.Option(
            help="Folder of the base, or a hub id, or the default model's name: writes that base with the adapter in "
            "its weights."
        ),
    ] = "",
    method: Annotated[
        str,
        typer.Option(
            help="How several become one, by PEFT's names: cat (exact, the ranks add up), svd (the nearest of --rank), "
            "linear (A and B added up, rough)."
        ),
    ] = "cat",
    rank: Annotated[int, typer.Option(min=0, help="Rank of svd; 0 for the largest of the adapters'.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Merge several adapters into one, or one or several into their base. Needs no server; PEFT for a base."""
    from lorikeet.adapters.errors import AdapterError
    from lorikeet.convert import algebra as lora_algebra

    check_json_file(json_file)
    if method not in lora_algebra.METHODS:
        fail(f"--method {method}: must be one of {', '.join(lora_algebra.METHODS)}", code=2)
    parts = _parts(mixture)
    if len(parts) == 1 and not base:
        fail("one folder is merged into a base: name it with --base", code=2)
    try:
        if len(parts) == 1 and parts[0][1] == 1:
            found = []
            _peft().merge_into(parts[0][0], target, _base_folder(base))
        elif base:
            with tempfile.TemporaryDirectory() as scratch:
                found = lora_algebra.merge(parts, Path(scratch) / "merged", method, rank)
                _peft().merge_into(Path(scratch) / "merged", target, _base_folder(base))
        else:
            found = lora_algebra.merge(parts, target, method, rank)
    except AdapterError as error:
        fail(str(error))
    if write_json(json_file, {"modules": [each._asdict() for each in found]}):
        if base:
            print(f"{target}: the base with the weights of {mixture}")
        else:
            worst = max(each.error for each in found)
            print(f"{target}: LoRA of {_rank_range(found)} on {len(found)} modules; largest error {worst:.2g}")


@app.command("compress")
def compress(
    folders: Annotated[list[Path], typer.Argument(help="Folders of adapters of one base.")],
    into: Annotated[Path, typer.Option(help="Folder to write, which must not exist.")],
    rank: Annotated[int, typer.Option(min=1, help="Largest of the joint basis.")],
    json_file: JsonFile = None,
) -> None:
    """Write many adapters on one joint basis: each module's A is the same for all of them. Needs no server."""
    from lorikeet.adapters.errors import AdapterError
    from lorikeet.convert import algebra as lora_algebra

    check_json_file(json_file)
    try:
        found = lora_algebra.compress(folders, into, rank)
    except AdapterError as error:
        fail(str(error))
    if not write_json(json_file, [each._asdict() for each in found]):
        return
    ranks = _rank_range(found)
    table = Table("adapter", "rank", "error", f"cut to {ranks} alone")
    for each in found:
        low, high = each.ranks
        table.add_row(
            each.name, f"{low} to {high}" if low < high else str(low), f"{each.error:.3g}", f"{each.alone:.3g}"
        )
    output().print(table)
    print(f"{into}: {len(found)} adapters of {ranks}; the error is the share of an adapter's change that is lost")


@app.command("diff")
def diff(
    first: Annotated[Path, typer.Argument(help="Folder of an adapter.")],
    second: Annotated[Path, typer.Argument(help="Folder of the other.")],
    json_file: JsonFile = None,
) -> None:
    """Compare two adapters: their configs, and module by module what they add to the base. Needs no server."""
    from lorikeet.adapters.errors import AdapterError
    from lorikeet.cli import adapter_report
    from lorikeet.convert import algebra as lora_algebra

    check_json_file(json_file)
    try:
        found = lora_algebra.diff(first, second)
    except AdapterError as error:
        fail(str(error))
    content = {
        "config": found.config,
        "modules": [each._asdict() for each in found.modules],
        "tensors": [each._asdict() for each in found.tensors],
    }
    if write_json(json_file, content):
        adapter_report.show_differences(found.config, found.modules, found.tensors)


def _parts(mixture: str) -> list[tuple[Path, float]]:
    """Parse folders and weights, which are spelled as in requests."""
    from lorikeet.chat.mixtures import spelled
    from lorikeet.http.errors import ApiError

    if Path(mixture).is_dir():
        return [(Path(mixture), 1.0)]
    try:
        parts = spelled(mixture)
    except ApiError as error:
        fail(str(error.detail))
    if parts is None and ("*" in mixture or "+" in mixture):
        fail(f"{mixture!r} is not a mixture; write for example './a*0.7+./b*0.3'", code=2)
    return [(Path(name), weight) for name, weight in parts or [(mixture, 1.0)]]


def _rank_range(found: Sequence[Any]) -> str:
    ranks = sorted({each.rank for each in found})
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"rank {ranks[0]} to {ranks[-1]}"


def _sizes(base: Path) -> tuple[ModelGeometry | None, str]:
    """Return the sizes that an adapter must fit, and the base's dtype; None if only a loaded base gives them."""
    from lorikeet.models.config import read_model_config
    from lorikeet.models.json_section import ModelConfigError

    try:
        config = read_model_config(base)
    except ModelConfigError:
        return None, ""
    return config.geometry(4 if config.dtype == "float32" else 2), config.dtype


def _compare(folder: Path, base: Path, prompt: str, tokens: int) -> dict[str, Any]:
    _peft()
    from lorikeet.cli.adapter_check import compare

    found = compare(folder, base, prompt, tokens)
    same = found.own == found.by_peft
    return {"same": same, **found._asdict()}


def _refuse_rank(context: typer.Context, form: str) -> None:
    """End the command if it has options of a rank, which a format that is rewritten exactly has no use for."""
    if given := {"rank", "tolerance"}.intersection(given_options(context)):
        fail(
            f"--{min(given)}: {form} is rewritten as it is; for a lower rank afterwards: `lorikeet adapters compress "
            "FOLDER --into OUT --rank RANK`",
            code=2,
        )


def _served(folder: Path, base: Path) -> "AdapterDescription | None":
    """Return the content of an adapter; None if it cannot be served without conversion."""
    from lorikeet.adapters.checkpoint import DescribeOptions
    from lorikeet.adapters.errors import AdapterError
    from lorikeet.adapters.reader import describe

    try:
        return describe(folder, DescribeOptions(_sizes(base)[0]))
    except AdapterError:
        return None


def _peft() -> Any:
    """Return the module that uses PEFT, or end the command with the way to install it."""
    from importlib.util import find_spec

    from lorikeet.core.text import install_command

    if find_spec("peft") is None:
        fail(f"this needs PEFT: run `{install_command('peers')}`")
    from lorikeet.convert import peft

    return peft


def _base_folder(base: str) -> Path:
    """Return the folder of a base. The default model's name means that model, unless a folder has the name."""
    from lorikeet.config import ConfigError, ModelSettings
    from lorikeet.models import default
    from lorikeet.models.model_folder import prepare_model

    model = "" if base == default.NAME and not Path(base).exists() else base
    try:
        return prepare_model(ModelSettings(model), lambda text: print(text, file=sys.stderr)).path
    except ConfigError as error:
        fail(str(error))
