from __future__ import annotations

import pytest

from treadle.runner.kv.prefix_view import PrefixView


def test_it_is_what_the_list_began_with() -> None:
    tokens = [5, 6, 7]
    first = PrefixView(tokens, 2)
    tokens.append(8)
    assert list(first) == [5, 6]
    assert (len(first), first[1], first[-1]) == (2, 6, 6)
    assert (first[1:9], first[:-1], first[2:]) == ([6], [5], [])
    with pytest.raises(IndexError):
        first[2]
