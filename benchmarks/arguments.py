"""Arguments that several benchmarks take."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

LONG_PROMPTS = [16_384, 65_536, 131_072]


def prepare_device() -> None:
    """Set the process up as a server's; call it before MLX computes anything."""
    from treadle.core.compute_path import KernelPolicy
    from treadle.runner.device import memory
    from treadle.runner.loading.loader import prepare_process

    prepare_process(memory.device().kind, KernelPolicy.AUTO)


def gib(text: str) -> int:
    """Return the bytes of so many GiB."""
    return int(float(text) * 2**30)


def add_model(parser: argparse.ArgumentParser, *, memory: str) -> None:
    """Add a model: a folder, or a shape with random weights; with so many GiB of `memory` by default."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a model folder")
    parser.add_argument("--family", help="a shape of gpu/family_shapes.py, with random weights")
    parser.add_argument("--bits", default="16")
    parser.add_argument("--config", type=json.loads, default={}, help="JSON of fields that replace the shape's")
    parser.add_argument("--small", action="store_true", help="a small model of the shape, for a CPU")
    parser.add_argument("--memory", type=gib, default=gib(memory), help="GiB for the model's cache")


def shape_config(options: argparse.Namespace, **defaults: Any) -> dict[str, Any]:
    """Return the configuration of the shape that `options` name, with fields other than the shape's by default."""
    from benchmarks.gpu.family_shapes import config_of

    return {**config_of(options.family, small=options.small), **defaults, **options.config}


def add_long_prompts(parser: argparse.ArgumentParser, *, rounds: int) -> None:
    """Add lengths of prompts, and the seed of what they are made of; with so many `rounds` by default."""
    parser.add_argument("--tokens", type=int, nargs="*", default=LONG_PROMPTS)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
