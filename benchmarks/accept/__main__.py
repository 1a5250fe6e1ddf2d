"""``python -m benchmarks.accept serve.2``: run one line; ``--status``: make docs/status.md and docs/performance.md."""

import argparse
import sys

from benchmarks.accept.lines import UnknownLineError, find_line
from benchmarks.accept.performance import write_performance
from benchmarks.accept.runs import StoredRuns
from benchmarks.accept.status import format_figure, write_result, write_status


def main() -> int:
    """Run what the command line asks for; 0 if the line's bound is met."""
    parser = argparse.ArgumentParser(prog="benchmarks.accept", description=__doc__)
    parser.add_argument("line", nargs="?", help="such as serve.2")
    parser.add_argument("--fresh", action="store_true", help="measure finished parts again")
    parser.add_argument("--status", action="store_true", help="only make docs/status.md and docs/performance.md")
    options = parser.parse_args()
    if options.status:
        print(write_status(), write_performance(), sep="\n")
        return 0
    if options.line is None:
        parser.error("name a line, or --status")
    try:
        found = find_line(options.line)
    except UnknownLineError as error:
        parser.error(str(error))
    runs = StoredRuns(found.name)
    if options.fresh:
        runs.clear()
    result = found.measure(runs)
    path = write_result(found, result)
    verdict = "met" if result.passed else f"NOT met: {result.cause}"
    print(f"{found.name}: {format_figure(result.figure)}; bound {found.bound}: {verdict}\n{path}")
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
