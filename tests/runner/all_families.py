"""Every architecture through every backend that it can take, held to mlx-lm's own greedy tokens.

    python -m tests.runner.all_families [--jobs 2] [--record] [ARCHITECTURE ...]

prints a line for each path of each architecture. All of them take twenty minutes on one core. `--record` puts what
was found into docs/figures/models.json, which `benchmarks/models_table.py` makes docs/models.md from.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import multiprocessing
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from tests.support.architectures import ARCHITECTURES, UNAVAILABLE, config_of

RECORD = Path(__file__).resolve().parents[2] / "docs" / "figures" / "models.json"
SAME = "same"
NOT_HERE = "not run"


def check(architecture: str) -> dict[str, str]:
    """What each path of `architecture` gave: "same", or the first difference in each way of computing it. Only
    "not run", with the reason, where its model can't be built here."""
    return dict(_paths(architecture))


def _paths(architecture: str) -> Iterator[tuple[str, str]]:
    from tests.runner.family_fidelity import Known, faults
    from tests.runner.family_paths import every_path

    known: Known = {}
    try:
        for name, model in every_path(config_of(architecture)):
            began = time.perf_counter()
            found = "; ".join(faults(model, known)) or SAME
            _show(f"| {architecture} | {name} | {found} | {time.perf_counter() - began:.0f} s |")
            yield name, found
    except (Exception, SystemExit) as error:  # mlx-lm's module of a model may end the process
        reason = UNAVAILABLE.get(architecture) or f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
        _show(f"| {architecture} | - | {NOT_HERE}: {reason} | |")
        yield NOT_HERE, reason


def _show(line: str) -> None:
    print(line, file=sys.__stdout__, flush=True)


def _quietly(architecture: str) -> tuple[str, dict[str, str]]:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    with contextlib.redirect_stdout(io.StringIO()):
        return architecture, check(architecture)


def record(found: dict[str, dict[str, str]]) -> None:
    """Put the results into the record, beside those of other architectures."""
    data = json.loads(RECORD.read_text(encoding="utf-8"))
    for architecture, paths in found.items():
        data["architectures"].setdefault(architecture, {})["fidelity"] = paths
    RECORD.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", choices=[*ARCHITECTURES, []], default=[], metavar="ARCHITECTURE")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    names = options.architectures or list(ARCHITECTURES)
    print("| architecture | path | tokens | time |\n|---|---|---|---|", flush=True)
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        found = dict(pool.imap_unordered(_quietly, names, chunksize=1))
    if options.record:
        record(found)
    wrong = {name for name, paths in found.items() if set(paths.values()) != {SAME} and NOT_HERE not in paths}
    run = len(names) - sum(NOT_HERE in paths for paths in found.values())
    print(f"{run - len(wrong)} of {run} architectures give mlx-lm's tokens on every path")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
