from __future__ import annotations

import pytest

from treadle.errors import InvalidRequest
from treadle.text import check_text


@pytest.mark.parametrize("text", ["", "plain", "Ünïcode 日本 🙂", "\x00\ufffd\uffff"])
def test_real_text_passes(text: str) -> None:
    check_text(text)


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "🙂\ude42"])
def test_a_lone_surrogate_is_the_clients_mistake_with_its_place(text: str) -> None:
    with pytest.raises(InvalidRequest, match="surrogate") as caught:
        check_text(text, param="prompt")
    assert caught.value.param == "prompt"
    assert caught.value.http_status == 400
