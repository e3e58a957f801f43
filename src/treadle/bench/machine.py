"""Facts about this machine that decide its speed."""

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
    """Describe the machine of the client, which is taken to be the servers' too."""
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
    """Return the processor's name, as the system reports it."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return _output_of("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def accelerator() -> str:
    """Return the names of NVIDIA GPUs; "Apple GPU" on Apple silicon; else ""."""
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return "Apple GPU"
    return ", ".join(_output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines())


def _output_of(program: str, *arguments: str) -> str:
    """Return the output of a small program; empty if it is missing or fails."""
    if shutil.which(program) is None:
        return ""
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
