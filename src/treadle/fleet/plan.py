"""Fleet plan: command lines of the workers and the gateway, and each worker's GPU or CPU cores."""

from __future__ import annotations

import functools
import os
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config import check_api_key
from ..environment import KEY_VARIABLE, KEYS_VARIABLE, SECRETS
from ..errors import ConfigError, spelled
from ..installation import Problem, install_command
from ..processes import free_ports
from .member import Member

GATEWAY = "smg"
MAX_REPLICAS = 64
POLICIES = ("cache_aware", "round_robin", "random", "power_of_two", "least_load", "consistent_hashing", "prefix_hash")
HEALTH_EVERY_S = 2
PATH_BYTES = 4096
GATEWAY_AUTH = ("--api-key", "--tenant-api-key", "--jwt-issuer")
_OWN = "the fleet gives each worker its own, so leave it out"
SET_BY_FLEET = {
    "--host": f"{_OWN}, or give the gateway's before the `--`",
    "--port": f"{_OWN}, or give the gateway's before the `--`",
    "--grpc-port": _OWN,
    "--drain": "give it before the `--`, for all members",
}
KEYS_FLAG = "--api-keys"
STDIN_ARGUMENTS = Path(__file__).with_name("stdin_arguments.py")


@dataclass(frozen=True)
class FleetPlan:
    """Settings of a fleet. Raises ConfigError for invalid ones.

    `worker_options` and `gateway_options` are passed on unchanged. `pin`: give each replica cores or a GPU of its own,
    if there are enough. `api_key`: required by the gateway and by the workers' HTTP servers.
    """

    model: str
    replicas: int
    host: str
    port: int
    policy: str
    logs: Path
    worker_options: Sequence[str] = ()
    gateway_options: Sequence[str] = ()
    pin: bool = True
    drain_s: float = 30.0
    api_key: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= MAX_REPLICAS:
            raise ConfigError(f"--replicas {self.replicas}: give 1 to {MAX_REPLICAS}", param="replicas")
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port}: give 1 to 65535", param="port")
        if not self.drain_s >= 0:
            raise ConfigError(f"--drain {self.drain_s:g}: give 0 or more seconds", param="drain")
        if self.policy not in POLICIES:
            raise ConfigError(f"--policy {self.policy}: use one of {', '.join(POLICIES)}", param="policy")
        if self.policy == "power_of_two" and self.replicas == 1:
            raise ConfigError("--policy power_of_two needs two replicas at least: give more, or another policy")
        if any(option.partition("=")[0] == "--api-key" for option in self.worker_options):
            raise ConfigError(
                "--api-key belongs before the `--`: the gateway and the workers share it", param="api_key"
            )
        for option in self.worker_options:
            if (name := option.partition("=")[0]) in SET_BY_FLEET:
                raise ConfigError(f"{name} behind the `--` is not for workers: {SET_BY_FLEET[name]}")
        if "--grpc-auth" in self.worker_options:
            raise ConfigError("--grpc-auth would keep the gateway out, which sends its workers no key: leave it out")
        if self.api_key is not None:
            with spelled({"api_key": "--api-key"}):
                check_api_key(self.api_key)
        if self.api_key is not None and "--api-key" in self.gateway_options:
            raise ConfigError("the gateway has two keys: leave out --api-key (TREADLE_API_KEY), or --gateway=--api-key")

    @functools.cached_property
    def worker_key(self) -> str | None:
        """The key with which the fleet queries the workers' HTTP status: the gateway's, or a random one if the workers
        have a keys file."""
        if self.api_key is not None or not self._workers_have_keys:
            return self.api_key
        return secrets.token_urlsafe(32)

    @functools.cached_property
    def ports(self) -> list[int]:
        """The free ports chosen for the fleet: HTTP and gRPC of each worker, and the gateway's metrics."""
        return free_ports(2 * self.replicas + 1, besides={self.port})

    @property
    def _workers_have_keys(self) -> bool:
        given = any(option.partition("=")[0] == KEYS_FLAG for option in self.worker_options)
        return given or bool(os.environ.get(KEYS_VARIABLE))

    @property
    def requires_key(self) -> bool:
        """Whether clients of the gateway must authenticate."""
        return self.api_key is not None or any(option in GATEWAY_AUTH for option in self.gateway_options)


@dataclass(frozen=True)
class Worker:
    """A worker, its addresses, and its share of the host as text."""

    member: Member
    http: str
    grpc: str
    place: str


def workers_of(plan: FleetPlan) -> list[Worker]:
    """Build the fleet's workers, not started. A worker keeps its ports over restarts."""
    return [_worker(plan, i, share) for i, share in enumerate(shares(plan.replicas, plan.pin))]


@dataclass(frozen=True)
class Share:
    """A replica's share of the host: a GPU, or CPU cores (None: all)."""

    gpu: int | None = None
    cores: frozenset[int] | None = None

    @property
    def text(self) -> str:
        if self.gpu is not None:
            return f"GPU {self.gpu}"
        return "all" if self.cores is None else "core " + ",".join(map(str, sorted(self.cores)))


def shares(replicas: int, pin: bool) -> list[Share]:
    """Divide the host: GPUs in turn, if there are any; else equal parts of the cores, if each gets one; else no
    division."""
    whole = [Share()] * replicas
    if not pin or replicas == 1:
        return whole
    gpus = _gpu_count()
    if gpus:
        return [Share(gpu=i % gpus) for i in range(replicas)]
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < replicas:
        return whole
    return [Share(cores=frozenset(cores[i::replicas])) for i in range(replicas)]


def _worker(plan: FleetPlan, index: int, share: Share) -> Worker:
    http, grpc = plan.ports[2 * index : 2 * index + 2]
    command = [sys.executable, "-m", "treadle", "serve", plan.model, "--host", "127.0.0.1", "--port", str(http)]
    command += ["--grpc-port", str(grpc), "--drain", f"{plan.drain_s:g}", *plan.worker_options]
    variables = {} if share.gpu is None else {"CUDA_VISIBLE_DEVICES": str(share.gpu)}
    variables |= {} if plan.worker_key is None else {KEY_VARIABLE: plan.worker_key}
    log = plan.logs / f"worker-{index + 1}.log"
    member = Member(f"worker {index + 1}", command, log, variables=variables, cores=share.cores)
    return Worker(member, f"http://127.0.0.1:{http}", f"grpc://127.0.0.1:{grpc}", share.text)


def gateway_of(plan: FleetPlan, workers: Sequence[Worker]) -> Member:
    """Build the gateway, not started. Raises ConfigError when it is not installed."""
    program = _gateway_program()
    if program is None:
        raise ConfigError(str(missing_gateway()))
    command = [*_with_stdin_arguments(program), "launch"] if plan.api_key is not None else [program, "launch"]
    command += ["--host", plan.host, "--port", str(plan.port), "--policy", plan.policy]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(plan.ports[-1])]
    command += ["--health-check-interval-secs", str(HEALTH_EVERY_S), "--health-failure-threshold", "1"]
    command += ["--health-success-threshold", "1", "--worker-startup-check-interval", str(HEALTH_EVERY_S)]
    command += ["--shutdown-grace-period-secs", f"{plan.drain_s:.0f}", *plan.gateway_options]
    command += ["--worker-urls", *(worker.grpc for worker in workers)]
    stdin_text = None if plan.api_key is None else f"--api-key\n{plan.api_key}\n"
    variables = {"HF_HUB_OFFLINE": "1"}
    return Member(
        "gateway",
        command,
        plan.logs / "gateway.log",
        variables=variables,
        stdin_text=stdin_text,
        hidden_variables=SECRETS,
    )


def _with_stdin_arguments(program: str) -> list[str]:
    """Return the command that runs `program` with arguments from standard input. Raises ConfigError unless it is a
    Python script."""
    interpreter = _interpreter(program)
    if not any("python" in Path(part).name for part in interpreter):
        raise ConfigError(
            f"{program} is no Python script, so it can't be given a key out of sight of ps: leave TREADLE_API_KEY out, "
            "and give the gateway's key as --gateway=--api-key=KEY"
        )
    return [*interpreter, str(STDIN_ARGUMENTS), program]


def _interpreter(program: str) -> list[str]:
    """Return the interpreter of a script, from its shebang or from pip's second line for long paths; [] without one."""
    with open(program, "rb") as file:
        first, second = (file.readline(PATH_BYTES).decode("utf-8", "replace").strip() for _ in range(2))
    if second.startswith("'''exec' "):
        return shlex.split(second)[1:2]
    return first.removeprefix("#!").split() if first.startswith("#!") else []


def missing_gateway() -> Problem | None:
    """Describe the missing gateway; None if it is installed."""
    if _gateway_program() is not None:
        return None
    return Problem(f"the gateway {GATEWAY} is not installed", install_command("fleet"), extra="fleet")


def _gateway_program() -> str | None:
    return shutil.which(GATEWAY, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def _gpu_count() -> int:
    """Return the number of NVIDIA GPUs."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=20)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
