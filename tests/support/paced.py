"""Whole server on a port whose steps take a set time and next to no CPU, to measure its promises on a busy machine.

python -m tests.support.paced --port 8502 --running 4 --step-ms 50 [--host 0.0.0.0] [--api-key KEY]
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import time

from tests.fronts.runner import FrontRunner
from tests.support.bytes_text import VOCABULARY, BytesTexts, bytes_text
from tests.support.capabilities import capabilities
from treadle.config import Settings
from treadle.core.messages import Submit
from treadle.core.plan import StepPlan, StepResult
from treadle.engine.admission import AdmissionLimits
from treadle.engine.client import EngineClient
from treadle.engine.owner import OwnerLimits
from treadle.engine.thread import ThreadOwner
from treadle.fronts.served_models import Models, ServedModel, model_names
from treadle.fronts.web.app import create_app
from treadle.fronts.web.serving import WebServer
from treadle.telemetry import Telemetry

CONTEXT = 4096


class PacedRunner(FrontRunner):
    """Runner each of whose steps takes `step_s`."""

    def __init__(self, step_s: float) -> None:
        super().__init__(_say_x, vocabulary=VOCABULARY, context=CONTEXT)
        self._step_s = step_s
        self._can = capabilities(self._can, decode_step_s=step_s)

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.clear()
        self.seen.clear()
        time.sleep(self._step_s)
        return super().execute(plan)


def _say_x(request: Submit, position: int) -> int:
    return ord("x")


async def serve(options: argparse.Namespace) -> None:
    step_s = options.step_ms / 1000
    limits = OwnerLimits(max_running=options.running, prefill_tokens=4096)
    waiting = options.running if options.waiting is None else options.waiting
    admission = AdmissionLimits(options.running, waiting, options.max_wait, by_forecast=options.waiting is None)
    telemetry = Telemetry()
    engine = EngineClient(
        lambda: ThreadOwner(lambda progress: PacedRunner(step_s), limits), admission, observers=[telemetry.metrics]
    )
    settings = Settings(served_model_name="m", api_key=options.api_key, host=options.host)
    model = ServedModel(model_names(settings), engine, BytesTexts(bytes_text(CONTEXT)))
    app = create_app(Models(model), settings, telemetry)
    listener = socket.create_server((options.host, options.port), backlog=2048)
    await engine.start()
    print(f"serving on {options.host}:{listener.getsockname()[1]}", flush=True)
    await WebServer(app).serve([listener])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--running", type=int, default=4)
    parser.add_argument("--waiting", type=int, help="places to wait; by forecast if left out")
    parser.add_argument("--max-wait", type=float, default=4.0)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--api-key")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
