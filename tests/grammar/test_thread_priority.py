"""Threads that compile grammars give way to the threads of the steps (P16)."""

from __future__ import annotations

import ctypes
import os
import sys
import threading

import pytest

from treadle.grammar.compiler import GrammarCompiler
from treadle.grammar.thread_priority import NICENESS, lower_priority

from .test_compiler import Harness, regex


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has a priority for single threads")
def test_a_grammar_is_compiled_at_low_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    found: list[int] = []
    real = GrammarCompiler._compile

    def compile_(compiler: GrammarCompiler, text: str) -> object:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return real(compiler, text)

    monkeypatch.setattr(GrammarCompiler, "_compile", compile_)
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    harness.compiled(regex())
    assert found == [min(before + NICENESS, 19)]
    harness.compiler.close()
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_on_a_mac_a_thread_is_given_a_class_of_service(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, int]] = []

    class Library:
        def pthread_set_qos_class_self_np(self, service: int, relative: int) -> None:
            given.append((service, relative))

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    lower_priority("darwin")
    assert given == [(0x11, 0)]
    lower_priority("win32")
    assert len(given) == 1
