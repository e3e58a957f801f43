from __future__ import annotations

from typing import get_args

import pytest

from treadle.core.capabilities import Capabilities
from treadle.core.messages import (
    BlockRemoved,
    BlocksCleared,
    BlockStored,
    Cancel,
    CancelJob,
    CancelReason,
    Failed,
    Finish,
    FinishReason,
    Image,
    JobDone,
    Loading,
    Output,
    Ping,
    Pong,
    Ready,
    RunJob,
    Sampling,
    StepReport,
    Stop,
    Stopped,
    Submit,
    TokenLogprob,
    WatchBlocks,
)
from treadle.core.statistics import EngineStatistics, RunnerStatistics
from treadle.engine.framing import HEADER, frame, from_owner, to_owner

SAMPLING = Sampling(
    temperature=0.5,
    top_p=0.9,
    top_k=3,
    min_p=0.1,
    repetition_penalty=1.1,
    presence_penalty=-1.0,
    frequency_penalty=2.0,
    logit_bias=((5, -100.0), (6, 1.5)),
    seed=2**63 - 1,
)
TO_OWNER = [
    Submit(id="a", prompt=(1,), max_tokens=1),
    Submit(
        id="b",
        prompt=tuple(range(100)),
        max_tokens=9,
        sampling=SAMPLING,
        stop_token_ids=(2, 3),
        min_tokens=1,
        logprobs=0,
        priority=-1,
        max_wait_s=4.5,
        group="g",
        images=(Image(start=3, count=4, hash=bytes(32), shm="pixels", shape=(16, 12), grid=((1, 4, 4),)),),
    ),
    *(Cancel(id="a", reason=reason) for reason in CancelReason),
    RunJob(id="j", name="save", args={"path": "/x", "n": 3, "deep": {"list": [1, None, "é"], "bytes": b"\x00"}}),
    CancelJob(id="j"),
    WatchBlocks("s"),
    WatchBlocks("s", on=False),
    Ping(),
    Stop(),
    Submit(id="c", prompt=(1,), max_tokens=9, generated=(4, 5), scored=3, resumed=True),
]
CAN = Capabilities(model="m", architecture="a", vocabulary=1, context=2, device="d", dtype="t", details={"blas": "x"})
FROM_OWNER = [
    Loading(stage="reading weights"),
    Ready(capabilities=CAN, pid=7, load_s=1.5),
    Failed(code="start_failed", message="no"),
    StepReport(step=1),
    StepReport(
        step=2,
        outputs=(
            Output(id="a", admitted=True, wait_s=0.25, prompt_tokens_done=0, cached_tokens=0),
            Output(id="b", tokens=(1, 2), logprobs=(TokenLogprob(logprob=-0.5, top=((1, -0.5), (2, -2.0))),) * 2),
            *(Output(id="c", finish=Finish(reason=r, stop_token_id=0, code="x", message="y")) for r in FinishReason),
        ),
        events=(BlocksCleared("s", lost=True), BlockStored("s", -(2**63), 0, (1, 2)), BlockRemoved("s", 2**63 - 1)),
        statistics=EngineStatistics(steps=2, runner=RunnerStatistics(active_bytes=2**40)),
    ),
    JobDone(id="j", result={"vectors": b"\x00\x01", "shape": [2, 3]}),
    JobDone(id="j", code="engine_job_failed", message="no"),
    Pong(),
    Stopped(),
]


@pytest.mark.parametrize("message", TO_OWNER, ids=lambda m: type(m).__name__)
def test_what_goes_to_the_owner_arrives_as_it_was(message):
    data = frame(message)
    assert HEADER.unpack(data[: HEADER.size]) == (len(data) - HEADER.size,)
    assert to_owner.decode(data[HEADER.size :]) == message


@pytest.mark.parametrize("message", FROM_OWNER, ids=lambda m: type(m).__name__)
def test_what_the_owner_says_arrives_as_it_was(message):
    assert from_owner.decode(frame(message)[HEADER.size :]) == message


def test_every_message_has_its_round_trip_here():
    assert {type(m) for m in TO_OWNER} == set(get_args(to_owner.type))
    assert {type(m) for m in FROM_OWNER} == set(get_args(from_owner.type))
