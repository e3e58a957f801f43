from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.core.messages import (
    BlockEvent,
    BlockRemoved,
    BlocksCleared,
    BlockStored,
    Finish,
    FinishReason,
    FromOwner,
    JobDone,
    Loading,
    Output,
    StepReport,
    Stopped,
    TokenLogprob,
    WaitReason,
)
from treadle.core.statistics import EngineStatistics
from treadle.engine import outbox
from treadle.engine.outbox import Outbox, merge


def _histories() -> st.SearchStrategy[list[StepReport]]:
    """Generate reports of steps: each sequence is admitted once, gains tokens, and may end once."""

    @st.composite
    def reports(draw: st.DrawFn) -> list[StepReport]:
        made = []
        begun: set[str] = set()
        ended: set[str] = set()
        for step in range(1, draw(st.integers(1, 8)) + 1):
            rows = draw(st.lists(st.sampled_from("abc"), unique=True))
            outputs = []
            for row in rows:
                if row in ended:
                    continue
                count = draw(st.integers(0, 3))
                finish = Finish(reason=FinishReason.LENGTH) if draw(st.integers(0, 4)) == 0 else None
                outputs.append(
                    Output(
                        id=row,
                        admitted=row not in begun,
                        wait_s=0.5 if row not in begun else 0.0,
                        tokens=tuple(draw(st.integers(0, 99)) for _ in range(count)),
                        logprobs=tuple(TokenLogprob(logprob=-float(i)) for i in range(count)),
                        prompt_logprobs=tuple(TokenLogprob(logprob=-float(step)) for _ in range(3 - count)),
                        prompt_tokens_done=draw(st.none() | st.integers(0, 9)),
                        cached_tokens=draw(st.none() | st.integers(0, 9)),
                        scored_tokens=draw(st.none() | st.integers(0, 9)),
                        kept_tokens=draw(st.none() | st.integers(0, 9)),
                        drafted=draw(st.integers(0, 9)),
                        accepted=draw(st.integers(0, 9)),
                        waits_for=draw(st.none() | st.sampled_from(WaitReason)),
                        finish=finish,
                    )
                )
                begun.add(row)
                if finish:
                    ended.add(row)
            made.append(StepReport(step=step, outputs=tuple(outputs), statistics=EngineStatistics(steps=step)))
        return made

    return reports()


def _seen(reports: list[StepReport]) -> dict[str, tuple[object, ...]]:
    """Return the resulting state of each sequence at the client."""
    known: dict[str, list[object]] = {}
    for output in (output for report in reports for output in report.outputs):
        row = known.setdefault(output.id, [0, 0.0, (), (), None, None, [], (), None, None, 0, 0, None])
        row[0] += output.admitted  # type: ignore[operator]
        row[1] += output.wait_s  # type: ignore[operator]
        row[2] += output.tokens  # type: ignore[operator]
        row[3] += output.logprobs  # type: ignore[operator]
        row[4] = row[4] if output.prompt_tokens_done is None else output.prompt_tokens_done
        row[5] = row[5] if output.cached_tokens is None else output.cached_tokens
        row[8] = row[8] if output.scored_tokens is None else output.scored_tokens
        row[9] = row[9] if output.kept_tokens is None else output.kept_tokens
        row[7] += output.prompt_logprobs  # type: ignore[operator]
        row[10] += output.drafted  # type: ignore[operator]
        row[11] += output.accepted  # type: ignore[operator]
        row[12] = row[12] if output.waits_for is None else output.waits_for
        if output.finish:
            row[6].append(output.finish)  # type: ignore[attr-defined]
    return {key: tuple(row) for key, row in known.items()}


@given(_histories(), st.integers(1, 4))
def test_a_reader_that_lags_learns_the_same(reports: list[StepReport], merge_after: int):
    """Merged equals concatenated: tokens in order, one admission, one end."""
    outbox = Outbox(merge_after=merge_after)
    for report in reports:
        outbox.put(report)
    got = outbox.take()
    assert len(got) <= merge_after
    assert _seen(got) == _seen(reports)  # type: ignore[arg-type]
    assert got[-1].step == reports[-1].step  # type: ignore[union-attr]
    assert got[-1].statistics == reports[-1].statistics  # type: ignore[union-attr]


def test_two_reports_are_merged_without_touching_them():
    first = StepReport(step=1, outputs=(Output(id="a", tokens=(1,)),))
    second = StepReport(step=2, outputs=(Output(id="b", tokens=(2,)), Output(id="a", tokens=(3,))))
    assert merge(first, second).outputs == (Output(id="a", tokens=(1, 3)), Output(id="b", tokens=(2,)))
    assert first.outputs == (Output(id="a", tokens=(1,)),)


def test_news_of_one_row_in_two_parts_of_a_report_are_not_lost():
    first = StepReport(step=1, outputs=(Output(id="a", tokens=(1,)), Output(id="a", tokens=(2,))))
    assert merge(first, StepReport(step=2)).outputs == (Output(id="a", tokens=(1, 2)),)


def test_only_reports_merge_and_the_order_stays():
    outbox = Outbox(merge_after=1)
    messages: list[FromOwner] = [
        Loading(stage="x"),
        StepReport(step=1),
        JobDone(id="j"),
        StepReport(step=2),
        StepReport(step=3),
        Stopped(),
    ]
    for message in messages:
        outbox.put(message)
    assert outbox.take() == [*messages[:3], StepReport(step=3), Stopped()]


def test_a_prompt_reader_gets_each_report():
    outbox = Outbox(merge_after=2)
    outbox.put(StepReport(step=1))
    outbox.put(StepReport(step=2))
    assert outbox.take_nowait() == [StepReport(step=1), StepReport(step=2)]
    assert outbox.take_nowait() == []


def test_take_waits_for_the_first_and_ends_after_the_close_has_drained():
    outbox = Outbox()
    batches: list[list[FromOwner]] = []
    got = threading.Event()

    def read() -> None:
        while batch := outbox.take():
            batches.append(batch)
            got.set()

    reader = threading.Thread(target=read)
    reader.start()
    outbox.put(Stopped())
    assert got.wait(60)
    outbox.close()
    reader.join(60)
    assert not reader.is_alive()
    assert batches == [[Stopped()]]


def test_what_was_put_before_the_close_is_still_taken():
    outbox = Outbox()
    outbox.put(Stopped())
    outbox.close()
    assert outbox.take() == [Stopped()]
    assert outbox.take() == []


STORED: tuple[BlockEvent, ...] = (BlockStored("a", 1, 0, (5, 6)), BlockRemoved("b", 2))


def test_block_events_stay_in_order() -> None:
    first, second = StepReport(step=1, events=STORED), StepReport(step=2, events=STORED[::-1])
    assert merge(first, second).events == STORED + STORED[::-1]


def test_too_many_block_events_give_way_to_one_a_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads it asks for what is there then."""
    monkeypatch.setattr(outbox, "MOST_EVENTS", 3)
    report = merge(StepReport(step=1, events=STORED), StepReport(step=2, events=STORED))
    assert report.events == (BlocksCleared("a", lost=True), BlocksCleared("b", lost=True))
    assert merge(report, StepReport(step=3, events=STORED[:1])).events == (*report.events, STORED[0])
