"""Where figures come from: what decides how fast this machine is."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

from ..installation import version
from .samples import Machine

CPUINFO = Path("/proc/cpuinfo")


def this_machine() -> Machine:
    """The machine that the client runs on, which is taken to be the servers' too."""
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        processor=processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        python=platform.python_version(),
        treadle=version(),
        accelerator=accelerator(),
    )


def processor(cpuinfo: Path = CPUINFO) -> str:
    """The processor's name, as the system has it."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return _said("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def accelerator() -> str:
    """The names of NVIDIA GPUs; "Apple GPU" on Apple silicon; else nothing."""
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return "Apple GPU"
    return ", ".join(_said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines())


def _said(program: str, *arguments: str) -> str:
    """What a small program prints; nothing where it is missing or fails."""
    if shutil.which(program) is None:
        return ""
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
