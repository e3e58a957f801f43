"""Vectors of MiniMax M2 and DeepSeek V3.2, after their chat templates."""

from __future__ import annotations

from collections.abc import Iterable

from treadle.text.events import Malformed, Reasoning, Text

from .family import Vector, begun, call, family

_CALLED = call(0, "get_weather", '{"city": "Paris"}')
_DSML = "｜DSML｜"


class _Writer:
    """Writer of calls. `prefix` begins the names of elements; `declares`: parameters say whether they are strings."""

    def __init__(self, block: str, prefix: str = "", *, declares: bool = False) -> None:
        self.begin, self.end = f"<{prefix}{block}>", f"</{prefix}{block}>"
        self.prefix = prefix
        self._declares = declares

    def block(self, *calls: str) -> str:
        return f"{self.begin}\n{''.join(calls)}{self.end}"

    def call(self, name: str, *parameters: tuple[str, str, bool]) -> str:
        return (
            f'<{self.prefix}invoke name="{name}">\n{"".join(self.parameter(*one) for one in parameters)}'
            f"</{self.prefix}invoke>\n"
        )

    def parameter(self, name: str, value: str, is_string: bool) -> str:
        declared = f' string="{str(is_string).lower()}"' if self._declares else ""
        return f'<{self.prefix}parameter name="{name}"{declared}>{value}</{self.prefix}parameter>\n'


def _vectors(write: _Writer) -> Iterable[Vector]:
    weather = write.call("get_weather", ("city", "Paris", True))
    paris = write.block(weather)
    begun_call = f'{write.begin}\n<{write.prefix}invoke name="get_weather">\n'
    yield Vector("one call", paris, _CALLED)
    yield Vector("several calls", write.block(weather, write.call("ping")), (*_CALLED, *call(1, "ping", "{}")))
    yield Vector("two blocks", f"{paris}\n{write.block(write.call('ping'))}", (*_CALLED, *call(1, "ping", "{}")))
    yield Vector("without line feeds", paris.replace("\n", ""), _CALLED)
    yield Vector("text before", f"I look it up.\n{paris}", (Text("I look it up."), *_CALLED))
    yield Vector("text behind", f"{paris}Done.", (*_CALLED, Text("Done.")))
    yield Vector(
        "all types",
        write.block(
            write.call(
                "search",
                ("query", "5", True),
                ("limit", "-3", False),
                ("exact", "false", False),
                ("score", "0.5", False),
                ("tags", '["a", {"b": null}]', False),
            )
        ),
        call(
            0,
            "search",
            '{"query": "5", "limit": -3, "exact": false, "score": 0.5, "tags": ["a", {"b": null}]}',
        ),
    )
    yield Vector(
        "braces, quotes, lines and elements in a string",
        write.block(write.call("write_file", ("path", "C:\\x", True), ("content", '<a b="c">\n}</parameter\n', True))),
        call(0, "write_file", '{"path": "C:\\\\x", "content": "<a b=\\"c\\">\\n}</parameter\\n"}'),
    )
    yield Vector(
        "unicode",
        write.block(write.call("search", ("query", "Zürich 東京 🙂", True))),
        call(0, "search", '{"query": "Zürich 東京 🙂"}'),
    )
    yield Vector(
        "an object and null",
        write.block(write.call("write_file", ("owner", "null", False), ("meta", '{"mode": 1}', False))),
        call(0, "write_file", '{"owner": null, "meta": {"mode": 1}}'),
    )
    yield Vector("no end of the block", f"{write.begin}\n{weather}", _CALLED)
    yield Vector(
        "reasoning before", f"Let me see.\n</think>\n\n{paris}", (Reasoning("Let me see."), *_CALLED), opened=True
    )
    yield Vector("malformed: text in the block", f"{write.begin}Paris", (Malformed(""), Text(f"{write.begin}Paris")))
    yield Vector(
        "malformed: text in a call",
        f"{begun_call}Paris",
        (*begun(0, "get_weather"), Malformed(""), Text("Paris")),
    )
    yield Vector(
        "malformed: no name",
        f"{write.begin}<{write.prefix}invoke>",
        (Malformed(""), Text(f"{write.begin}<{write.prefix}invoke>")),
    )
    yield Vector("cut off in an element", begun_call[:-8], (Malformed(""), Text(begun_call[:-8])))
    yield Vector(
        "cut off in a string",
        begun_call + write.parameter("city", "Par", True).partition("</")[0],
        begun(0, "get_weather", '{"city": "Par'),
    )
    yield Vector("no call", "Just <invoke>.", (Text("Just <invoke>."),))


_DECLARED = _Writer("function_calls", _DSML, declares=True)

VECTORS = [
    *family(
        "minimax",
        _vectors(_Writer("minimax:tool_call")),
        special=("<minimax:tool_call>", "</minimax:tool_call>"),
        reasoning="think",
    ),
    *family("deepseek_v32", _vectors(_DECLARED), special=(_DSML,), reasoning="think"),
    *family(
        "deepseek_v32",
        [
            Vector(
                "the declared type decides",
                _DECLARED.block(_DECLARED.call("ping", ("a", "3", True), ("b", "3", False), ("c", "x", False))),
                call(0, "ping", '{"a": "3", "b": 3, "c": "x"}'),
            ),
            Vector(
                "another name of the block",
                _Writer("tool_calls", _DSML, declares=True).block(_DECLARED.call("ping")),
                call(0, "ping", "{}"),
            ),
        ],
        special=(_DSML,),
    ),
]
