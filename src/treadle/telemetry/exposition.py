"""Writer of Prometheus' text format 0.0.4, one metric family at a time.

prometheus_client's own writer formats all families at once, blocking the event loop for about twice the total time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from prometheus_client.metrics_core import Metric

SPECIAL = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def format_family(family: Metric) -> str:
    """Return the family's lines: help, type, samples."""
    name = f"{family.name}_total" if family.type == "counter" else family.name
    about = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
    lines = [f"# HELP {name} {about}", f"# TYPE {name} {family.type}"]
    lines += [f"{sample.name}{_labels(sample.labels)} {_number(sample.value)}" for sample in family.samples]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join([f'{name}="{value.translate(SPECIAL)}"' for name, value in sorted(labels.items())]) + "}"


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
