"""Write docs/models.md from docs/figures/models.json and the measured ratios.

    python benchmarks/models_table.py [--record]

With `--record` the backend of each architecture is chosen anew, by the loader's own choice with a tiny random model,
and written to docs/figures/models.json first; this takes a minute or two. CUDA is stood for by kernels on the host.
`python -m tests.runner.all_families --record` records the fidelity of each path. The ratios are those of
`benchmarks/gpu/families_steps.py --json docs/figures/models-h200.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

PAGE = ROOT / "docs" / "models.md"
RECORD = ROOT / "docs" / "figures" / "models.json"
RATIOS = ROOT / "docs" / "figures" / "models-h200.json"
DEVICES = ("cuda", "cpu")
ITEM: dict[str, Any] = {"width": 120, "subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
BETTER = {
    "cuda": ("fused layers", "compiled passes", "paged", "narrowed last layer", "contiguous", "padded"),
    "cpu": ("narrowed last layer", "contiguous", "padded"),
}
"""The paths that a reason is given for, best first."""

HEAD = """# Models

Treadle serves every architecture of mlx-lm {version}. This page has the compute path of each one, as the loader chooses
it for a tiny random model; the self-tests at every start decide for the real one, and `treadle doctor MODEL` says what
to expect before anything is loaded. `benchmarks/models_table.py` writes this page.

- **Backend**: [`paged`, `contiguous`, `padded` or `serial`](glossary.md#computation), best first. CUDA means MLX's CUDA
  build with heads and types that the kernels take (bfloat16 or float16). On a CPU and on Metal the backend is the same.
- **Passes** on CUDA: `fused` where decoder layers are fused kernels, `compiled` where the model's own layers are
  compiled into one program.
- **Prefixes**: how a prompt reuses the beginning of another. `blocks`: pages are shared in place, with the pages
  of sliding `windows` and the `states` of recurrent layers at positions that are kept. `copies`: any prefix of a
  running or cached sequence is copied. `snapshots`: copies of the whole state at positions that are kept.
- **Fidelity**: the paths whose greedy tokens in float32 are mlx-lm's own, for prompts of 1 to 210 tokens and beyond the
  window: alone, together, in chunks of any size, from cached prefixes, and after preemption
  (`python -m tests.runner.all_families`). "all" are all paths that the architecture can take.
- **H200**: milliseconds of a decode step over mlx-lm's BatchGenerator's, at real sizes of layers, with 1 / 8 / 32
  sequences of 500 tokens (`benchmarks/gpu/families_steps.py`). Less than 1 is faster. Empty: not measured.

A model type that is another one's architecture is in the row of that one: {remapped}.

"""
REASONS = """
## Better paths that are refused

"""
NOT_RUN = """
## Not run

"""


def record() -> None:
    """Choose the backends of all architectures, and write them. The fidelity of an architecture whose path was not run
    is dropped."""
    from tests.support.architectures import ARCHITECTURES

    from treadle.installation import version_of

    known = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {"architectures": {}}
    found = {}
    for name in ARCHITECTURES:
        found[name] = paths_of(name)
        fidelity = known["architectures"].get(name, {}).get("fidelity", {})
        if "cuda" in found[name] and _name(found[name]["cuda"]) in fidelity:
            found[name]["fidelity"] = fidelity
        print(name, *(path.get("backend", "") for path in found[name].values()), file=sys.__stdout__, flush=True)
    data = {"mlx-lm": version_of("mlx-lm"), "architectures": found}
    RECORD.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _name(path: Mapping[str, Any]) -> str:
    """The name of a path in the record of fidelity."""
    return ", ".join([path["backend"], *([path["passes"]] if path["passes"] else [])])


def paths_of(architecture: str) -> dict[str, dict[str, Any]]:
    """The path of `architecture` on each device; only "not run", with the reason, where it can't be built here."""
    from tests.support.architectures import UNAVAILABLE, config_of

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return {device: path_of(config_of(architecture), device) for device in DEVICES}
    except (Exception, SystemExit) as error:  # mlx-lm's module of a model may end the process
        reason = UNAVAILABLE.get(architecture) or f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
        return {"not run": {"reason": reason}}


def _reason(text: str) -> str:
    """A reason without figures and names of modules, which differ."""
    text = re.sub(r" for mlx_lm\.\S+", "", text)
    return " ".join(text.split(": the difference is")[0].split())[:160]


def path_of(config: dict[str, Any], device: str) -> dict[str, Any]:
    """The path that the loader chooses on `device` for a model of `config`."""
    from tests.runner.family_paths import chosen, passes_of

    from treadle.runner.loading.expected import prefix_reuse
    from treadle.runner.loading.model import build_backend

    model = chosen(config, device)
    backend = build_backend(model, {}, lambda: 0.0)
    facts = {
        "backend": backend.name,
        "passes": passes_of(model),
        "prefixes": prefix_reuse(model.choice.config),
        "lookahead": backend.lookahead,
        "why": {one.backend: _reason(one.reason) for one in model.choice.rejected if one.backend in BETTER[device]},
    }
    backend.close()
    return facts


def page(data: Mapping[str, Any], ratios: list[dict[str, Any]]) -> str:
    """The whole document."""
    return "".join(_lines(data, ratios))


def _lines(data: Mapping[str, Any], ratios: list[dict[str, Any]]) -> Iterator[str]:
    yield HEAD.format(version=data["mlx-lm"], remapped=_remapped())
    yield "| architecture | CUDA | passes | prefixes | CPU, Metal | prefixes | fidelity | H200, 16 bits | 4 bits |\n"
    yield "|" + "---|" * 9 + "\n"
    rows = sorted(data["architectures"].items(), key=lambda item: item[0].lower())
    for name, facts in rows:
        if "cuda" in facts:
            yield _row(name, facts, {one["bits"]: one for one in ratios if one["family"] == name})
    yield REASONS
    for (path, reason), names in _reasons(rows).items():
        yield textwrap.fill(f"- **{path}**, {reason}: {', '.join(names)}", **ITEM) + "\n"
    yield NOT_RUN
    for name, facts in rows:
        if "not run" in facts:
            yield f"- {name}: {_cell(facts['not run']['reason'])}\n"


def _reasons(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[tuple[str, str], list[str]]:
    """Architectures by the better path that CUDA's choice refused, and the reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in BETTER["cuda"]:
        for name, facts in rows:
            if reason := facts.get("cuda", {}).get("why", {}).get(path):
                found.setdefault((path, reason), []).append(name)
    return found


def _row(name: str, facts: Mapping[str, Any], ratios: Mapping[str, Mapping[str, Any]]) -> str:
    cuda, elsewhere = facts["cuda"], facts["cpu"]
    cells = [
        name,
        cuda["backend"],
        cuda["passes"],
        cuda["prefixes"],
        elsewhere["backend"],
        elsewhere["prefixes"],
        _fidelity(facts.get("fidelity", {})),
        *(_ratio(ratios.get(bits)) for bits in ("16", "4")),
    ]
    return f"| {' | '.join(cells)} |\n"


def _fidelity(paths: Mapping[str, str]) -> str:
    """The paths that gave mlx-lm's tokens."""
    if not paths:
        return "not run"
    wrong = [name for name, found in paths.items() if found != "same"]
    return "all" if not wrong else f"all but {', '.join(wrong)}"


def _ratio(measured: Mapping[str, Any] | None) -> str:
    steps = [] if measured is None else measured.get("steps", [])
    return " / ".join(f"{step['ratio']:.2f}" for step in steps if "ratio" in step)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _remapped() -> str:
    from treadle.models.architectures import renamed

    return ",\n".join(f"{name} ({to})" for name, to in sorted(renamed().items()))


def found() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The recorded paths and the measured ratios."""
    ratios = json.loads(RATIOS.read_text(encoding="utf-8")) if RATIOS.exists() else []
    return json.loads(RECORD.read_text(encoding="utf-8")), ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="choose the backends anew")
    if parser.parse_args().record:
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        record()
    PAGE.write_text(page(*found()), encoding="utf-8")


if __name__ == "__main__":
    main()
