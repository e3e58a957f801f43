"""Output of child programs, as it is quoted in errors."""

from __future__ import annotations

import pytest

from treadle.processes import LAST_CHARS, last_lines

TRACEBACK = """\x1b[2m2026-11-29\x1b[0m \x1b[32m INFO\x1b[0m ready
Error starting router: Failed to bind
Traceback (most recent call last):
  File "cli.py", line 8, in <module>
    sys.exit(main())
RuntimeError: Failed to bind the HTTP listener on 127.0.0.1:8000: Address already in use
"""


@pytest.mark.parametrize(
    ("output", "quoted"),
    [
        ("", ""),
        ("one\n\n two \nthree\nfour\nfive\n", "two | three | four | five"),
        ("\x1b[31mred\x1b[0m \x1b]0;title\x07text\nbe\x07ll\x1bM", "red text | bell"),
        (TRACEBACK, "RuntimeError: Failed to bind the HTTP listener on 127.0.0.1:8000: Address already in use"),
        ("treadle: error: first\ntreadle: error: no model\n\x1b[2mbye\x1b[0m\n", "treadle: error: no model | bye"),
        ("no Error: here\nlast", "no Error: here | last"),
    ],
)
def test_the_end_of_an_output_is_one_line_that_begins_with_its_error(output: str, quoted: str) -> None:
    assert last_lines(output) == quoted


def test_a_quote_is_short() -> None:
    assert last_lines("x" * 5000 + "end") == ("x" * 5000 + "end")[-LAST_CHARS:]
    assert last_lines("ValueError: " + "x" * 5000) == ("ValueError: " + "x" * 5000)[:LAST_CHARS]
    assert last_lines("ValueError: far away\n" + "line\n" * 100) == "line | line | line | line"
