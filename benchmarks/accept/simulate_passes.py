"""Runs a scenario several times in one process and prints its peak memory: ``python -m … SCENARIO PASSES``."""

import json
import resource
import sys
from pathlib import Path

from lorikeet.simulator.scenario import make_scenario
from lorikeet.simulator.study import run_scenario


def main() -> None:
    """Print one line of JSON."""
    scenario = make_scenario(Path(sys.argv[1]), {})
    for _ in range(int(sys.argv[2])):
        completed = run_scenario(scenario, lambda stage, done, total: None).figures.completed
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"peak_bytes": peak_bytes, "completed": completed}))


if __name__ == "__main__":
    main()
