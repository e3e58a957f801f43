"""Traces: what a line means, and what is wrong with one that means nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from treadle.bench.errors import BenchError
from treadle.bench.plan import Moment, PromptMessage
from treadle.bench.trace import read_trace
from treadle.bench.workloads import digest


def trace(folder: Path, *lines: str) -> Path:
    path = folder / "day.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_a_line_is_a_request(tmp_path: Path) -> None:
    workload = read_trace(
        trace(
            tmp_path,
            '{"prompt": "Hi", "at_s": 0.5, "max_tokens": 3, "id": "a", "session": "s"}',
            "",
            '{"messages": [{"role": "user", "content": "Ho"}], "after": "a", "delay_s": 2, "leave_after_s": 1}',
        )
    )
    first, second = workload.requests
    assert (first.id, first.messages, first.at_s, first.max_tokens) == ("a", (PromptMessage("user", "Hi"),), 0.5, 3)
    assert (first.session, first.after, first.leave, first.stream) == ("s", None, None, True)
    assert (second.id, second.after) == ("line 3", Moment("a", "end", delay_s=2.0))
    assert second.leave == Moment("line 3", "sent", delay_s=1.0)
    assert workload.name.startswith("trace day ")


def test_another_trace_of_the_same_name_is_another_workload(tmp_path: Path) -> None:
    first = read_trace(trace(tmp_path, '{"prompt": "a"}'))
    second = read_trace(trace(tmp_path, '{"prompt": "b"}'))
    assert first.name != second.name
    assert digest(first) != digest(second)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ((), "has no requests"),
        (('{"prompt": "a"}', '{"prompt": "b'), "line 2: .*truncated"),
        (("[1]",), "line 1: "),
        (('{"prompt": "a", "max_token": 3}',), "line 1: .*max_token"),
        (('{"prompt": 7}',), "line 1: "),
        (("{}",), "line 1: give either prompt or messages"),
        (('{"prompt": "a", "messages": []}',), "line 1: give either prompt or messages"),
        (('{"messages": []}',), "line 1: .*messages"),
        (('{"prompt": "a", "max_tokens": 0}',), "max_tokens must be at least 1"),
        (('{"prompt": "a", "at_s": -1}',), "not negative"),
        (('{"prompt": "a", "leave_after_s": -1}',), "not negative"),
        (('{"prompt": "a", "id": "x"}', '{"prompt": "a", "id": "x"}'), "'x' is there twice"),
        (('{"prompt": "a", "after": "x"}', '{"prompt": "a", "id": "x"}'), "'line 1' waits for 'x'"),
    ],
)
def test_what_is_wrong_with_a_trace_is_told_with_its_line(tmp_path: Path, lines: tuple[str, ...], says: str) -> None:
    with pytest.raises(BenchError, match=says):
        read_trace(trace(tmp_path, *lines))


def test_a_trace_that_is_not_there_or_no_text_is_told(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="can't be read"):
        read_trace(tmp_path / "none.jsonl")
    path = tmp_path / "bytes.jsonl"
    path.write_bytes(b'{"prompt": "\xff\xfe"}')
    with pytest.raises(BenchError, match="line 1"):
        read_trace(path)
