"""The papers' figures beside ours: ``python -m benchmarks.papers run|table|pages``."""

import argparse
import sys
from pathlib import Path

from benchmarks.harness import ROOT
from benchmarks.papers.cache import Cache, default_folder, run_missing
from benchmarks.papers.claims import PAPERS, read_claims
from benchmarks.papers.measure import Run
from benchmarks.papers.pages import unexplained, write_page
from benchmarks.papers.table import Row, as_json, load_paper, print_rows, rows_of, runs_of, share_words


def main(arguments: list[str] | None = None) -> None:
    """Read the command line and run its command."""
    given = _parser().parse_args(arguments)
    cache = Cache(given.cache)
    papers = [given.paper] if given.paper else list(PAPERS)
    if given.command == "run":
        claims = _claims(given.paper, given.claim)
        _make(runs_of(given.paper, claims), cache, given)
        _show(rows_of(given.paper, cache, claims))
    elif given.command == "table":
        _make([run for paper in papers for run in runs_of(paper)], cache, given)
        by_paper = [rows_of(paper, cache) for paper in papers]
        if given.json is None:
            for rows in by_paper:
                _show(rows)
        else:
            text = as_json(row for rows in by_paper for row in rows)
            if given.json == "-":
                sys.stdout.write(text)
            else:
                Path(given.json).write_text(text)
    else:
        papers = [paper for paper in papers if load_paper(paper) is not None]
        _make([run for paper in papers for run in runs_of(paper)], cache, given)
        for paper in papers:
            print(write_page(paper, given.folder, cache))


def _parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--processes", type=int, default=2, help="runs at the same time (default: 2)")
    shared.add_argument("--cache", type=Path, default=default_folder(), help="folder of finished runs (%(default)s)")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", parents=[shared], help="make the runs of a paper that are missing")
    run.add_argument("paper", choices=PAPERS)
    run.add_argument("--claim", action="append", metavar="ID", help="only what this claim needs; may be repeated")
    run.add_argument("--fresh", action="store_true", help="make all runs again")
    table = commands.add_parser("table", parents=[shared], help="print the table of all claims, or of one paper's")
    table.add_argument("paper", nargs="?", choices=PAPERS)
    table.add_argument("--json", metavar="FILE", help="write a JSON list of objects to a file, or to - for stdout")
    table.add_argument("--cached", action="store_true", help="make no runs: claims without are 'not run'")
    pages = commands.add_parser("pages", parents=[shared], help="write the pages with plots")
    pages.add_argument("paper", nargs="?", choices=PAPERS)
    pages.add_argument("--cached", action="store_true", help="make no runs: what is missing is left out")
    pages.add_argument("--folder", type=Path, default=ROOT / "docs" / "papers", help="(default: docs/papers)")
    return parser


def _claims(paper: str, asked: list[str] | None) -> list[str] | None:
    """Return the ids of the named claims without the paper's prefix; ``None`` for all."""
    if asked is None:
        return None
    known = [claim.id for claim in read_claims(paper).claim]
    claims = [name.removeprefix(f"{paper}/") for name in asked]
    unknown = sorted(set(claims) - set(known))
    if unknown:
        sys.exit(f"{paper} prints no claim {', '.join(unknown)}; it prints {', '.join(known)}")
    return claims


def _make(runs: list[Run], cache: Cache, given: argparse.Namespace) -> None:
    if getattr(given, "cached", False):
        return
    if getattr(given, "fresh", False):
        cache.forget(runs)
    try:
        run_missing(runs, cache, given.processes, lambda line: print(line, file=sys.stderr, flush=True))
    except RuntimeError as error:
        sys.exit(str(error))


def _show(rows: list[Row]) -> None:
    print_rows(rows)
    print(share_words(rows))
    without = unexplained(rows)
    print(f"without a cause: {', '.join(without)}\n" if without else "")


if __name__ == "__main__":
    main()
