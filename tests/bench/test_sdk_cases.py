"""How the cases of SDKs are run: none waits without an end, and none asks another place than the server under test."""

from __future__ import annotations

import subprocess
import sys
import threading

from benchmarks.clients import sdks
from benchmarks.clients.chats import Server
from benchmarks.clients.results import ROOT

SERVER = Server("http://127.0.0.1:1/v1", "tiny", "none", 16)


def test_a_case_without_an_end_fails_at_its_limit_whatever_its_client_catches() -> None:
    def check(server: Server) -> None:
        while True:
            try:
                threading.Event().wait()
            except Exception:
                continue

    row = sdks.row(("pytest", "chat", "waits", "pytest", "pytest", check), SERVER, [], limit_s=0.05)
    assert not row.passed
    assert row.detail.startswith("Overdue: no end within 0.05 s, in ")
    assert "threading.py:" in row.detail


CONFINED = """
import socket
from benchmarks.clients import sdks
from benchmarks.clients.chats import Server

listener = socket.create_server(("127.0.0.1", 0))
url = "http://localhost:%d/v1" % listener.getsockname()[1]
refused = sdks.confine(url)

def stray(server):
    for address in (("127.0.0.1", 11434), ("prices.example", 443)):
        try:
            socket.create_connection(address)
        except OSError:
            pass

def straight(server):
    socket.create_connection(listener.getsockname()).close()

for check in (stray, straight):
    row = sdks.row(("pytest", "chat", "asks", "pytest", "pytest", check), Server(url, "m", "k", 1), refused, 60.0)
    print(row.passed, row.detail)
"""


def test_a_case_that_asks_another_place_is_refused_it_and_fails() -> None:
    ran = subprocess.run([sys.executable, "-c", CONFINED], cwd=ROOT, capture_output=True, text=True, timeout=60)
    stray, straight = ran.stdout.splitlines()
    assert stray.startswith("False AssertionError: it asked others than the server: ")
    assert "('127.0.0.1', 11434)" in stray
    assert "('prices.example', 443)" in stray
    assert straight.rstrip() == "True"
