"""What text workers remember of grammars."""

from __future__ import annotations

import pytest

from treadle.text.work import checked_grammars as module
from treadle.text.work.checked_grammars import REFUSED_S, CheckedGrammars


def test_a_refusal_is_repeated_for_a_while() -> None:
    now = [0.0]
    grammars = CheckedGrammars(lambda: now[0])
    grammars.broke_a_limit(b"bad", "too much")
    now[0] = REFUSED_S
    refused = grammars.refusal(b"bad")
    assert refused is not None
    assert refused.message == "too much"
    now[0] += 1
    assert grammars.refusal(b"bad") is None
    assert grammars.is_new(b"bad")


def test_a_grammar_that_passed_is_not_new_and_none_never_is() -> None:
    grammars = CheckedGrammars(lambda: 0.0)
    assert grammars.is_new(b"good")
    grammars.passed(b"good")
    grammars.passed(b"")
    grammars.broke_a_limit(b"", "too much")
    assert not grammars.is_new(b"good")
    assert not grammars.is_new(b"")
    assert grammars.refusal(b"good") is None
    assert grammars.refusal(b"") is None


def test_the_grammars_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GRAMMARS", 2)
    grammars = CheckedGrammars(lambda: 0.0)
    for digest in (b"1", b"2", b"1", b"3"):
        grammars.passed(digest)
    assert [grammars.is_new(digest) for digest in (b"1", b"2", b"3")] == [False, True, False]
