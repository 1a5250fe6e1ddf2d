"""Simulates a scenario and prints which parts of Lorikeet its time goes to: ``python -m … SCENARIO``."""

import json
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

from lorikeet.simulator.scenario import make_scenario
from lorikeet.simulator.study import run_scenario

SAMPLE_S = 0.005


def main() -> None:
    """Print one line of JSON: by module, the share of the processor's time, samples taken evenly."""
    scenario = make_scenario(Path(sys.argv[1]), {})
    samples: Counter[str] = Counter()

    def note(number: int, frame: FrameType | None) -> None:
        while frame is not None and not frame.f_globals["__name__"].startswith("lorikeet."):
            frame = frame.f_back
        samples["others" if frame is None else frame.f_globals["__name__"]] += 1

    signal.signal(signal.SIGPROF, note)
    signal.setitimer(signal.ITIMER_PROF, SAMPLE_S, SAMPLE_S)
    run_scenario(scenario, lambda stage, done, total: None)
    signal.setitimer(signal.ITIMER_PROF, 0)
    print(json.dumps({module: count / samples.total() for module, count in samples.most_common()}))


if __name__ == "__main__":
    main()
