"""Files of a model folder, mutated from valid ones and read as the server reads them."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.poison.fuzz.mutate import NUMBERS, TEXTS, changed, torn, value, words, written
from tests.support.tiny import make_tiny
from treadle.errors import TreadleError
from treadle.models import folder_checks, safetensors_file
from treadle.models.gguf_file import GgufFile

CONFIG_KEYS = words(
    "model_type num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim "
    "vocab_size rope_theta rope_scaling rope_parameters rms_norm_eps max_position_embeddings tie_word_embeddings "
    "attention_bias mlp_bias eos_token_id bos_token_id quantization quantization_config sliding_window layer_types "
    "text_config torch_dtype architectures num_experts hidden_act rope_traditional partial_rotary_factor auto_map "
    "model_file"
)
TOKENIZER_KEYS = words(
    "type pattern Regex String content normalizers pretokenizers decoders processors behavior invert add_prefix_space "
    "use_regex trim_offsets vocab merges unk_token byte_fallback ignore_merges dropout id special normalized "
    "single_word lstrip rstrip truncation padding max_length stride strategy post_processor decoder normalizer "
    "pre_tokenizer"
)
MESSAGES = [{"role": "user", "content": "hi <|im_end|>"}, {"role": "assistant", "content": "ho"}]


class Bench:
    """A good model folder, and a copy of it for each case."""

    def __init__(self, root: Path) -> None:
        self._good = make_tiny(root / "good", context=256)
        self._root = root

    def folder(self) -> Path:
        shutil.rmtree(self._root / "case", ignore_errors=True)
        return shutil.copytree(self._good, self._root / "case")


def safetensors(rng: random.Random, bench: Bench) -> None:
    """A header that is refused, or one that MLX reads with the same shapes."""
    path = bench.folder() / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if rng.random() < 0.7:
        names = rng.sample(sorted(header), 3)
        text = written(rng, changed(rng, {name: header[name] for name in names}, ("dtype", "shape", "data_offsets")))
        size = len(text) if rng.random() < 0.9 else rng.choice(NUMBERS) % 2**64
        data = size.to_bytes(8, "little") + text + data[8 + length :]
    else:
        data = torn(rng, data[: rng.choice((100, 3000, len(data)))])
    path.write_bytes(data)
    tensors = safetensors_file.read_header(path)
    import mlx.core as mx

    with contextlib.suppress(RuntimeError, ValueError, OverflowError):  # what the loader answers with a line
        read: Any = mx.load(str(path))
        assert set(read) <= {*tensors}, "MLX reads tensors that the check did not see"
        for name, array in read.items():
            assert tuple(array.shape) == tensors[name].shape, name
            mx.eval(array)


def gguf(rng: random.Random, bench: Bench) -> None:
    """A GGUF file."""
    path = bench.folder() / "model.gguf"
    path.write_bytes(torn(rng, _gguf(rng)) if rng.random() < 0.8 else _gguf(rng))
    file = GgufFile(path)
    for tensor in file.tensors[:20]:
        file.raw(tensor, min(tensor.size, 64) if tensor.size >= 0 else 64)


def _gguf(rng: random.Random) -> bytes:
    """A small file with one value of each kind, of which any may be odd."""
    odd = rng.choice((0, 0, 0, *NUMBERS)) % 2**64
    text = lambda words: struct.pack("<Q", len(words)) + words  # noqa: E731
    values = [
        text(b"general.alignment") + struct.pack("<II", 4, rng.choice((32, 32, 0, 1, 2**32 - 1))),
        text(b"name") + struct.pack("<I", 8) + text(b"tiny"),
        text(b"list")
        + struct.pack("<IIQ", 9, rng.choice((4, 8, 9, 99)), rng.choice((2, odd)))
        + struct.pack("<II", 1, 2),
    ]
    shape = struct.pack("<Q", rng.choice((4, odd)))
    tensors = (
        text(b"a")
        + struct.pack("<I", rng.choice((1, 1, 0, 2**31)))
        + shape
        + struct.pack("<IQ", 0, rng.choice((0, odd)))
    )
    head = b"GGUF" + struct.pack("<IQQ", rng.choice((2, 3, 3, 1)), rng.choice((1, odd)), rng.choice((len(values), odd)))
    return head + b"".join(values) + tensors + bytes(64)


def config(rng: random.Random, bench: Bench) -> None:
    """A config.json or generation_config.json, of a model that is loaded where it is not refused."""
    from treadle.runner.loading.loader import load
    from treadle.text.tokenizer import TextModel

    folder = bench.folder()
    name = rng.choice(("config.json", "config.json", "config.json", "generation_config.json", "tokenizer_config.json"))
    path = folder / name
    valid = json.loads(path.read_text()) if path.exists() else {"temperature": 0.5, "eos_token_id": [258], "top_k": 5}
    path.write_bytes(written(rng, changed(rng, valid, CONFIG_KEYS)))
    folder_checks.check(folder)
    TextModel.load(folder)
    load(folder, memory=1 << 24, max_running=2, prefill_tokens=64)


def tokenizer(rng: random.Random, bench: Bench) -> None:
    """A tokenizer.json, used where it is not refused."""
    from treadle.text.tokenizer import TextModel

    folder = bench.folder()
    path = folder / "tokenizer.json"
    document = changed(rng, json.loads(path.read_text()), TOKENIZER_KEYS)
    path.write_bytes(written(rng, document))
    folder_checks.check(folder)
    model = TextModel.load(folder)
    for text in ("hi", "a b\n\u00e9\U0001f600<eos>", "x" * 200):
        ids = model.encode(text)
        model.decode(ids[:50])
    model.decode([0, 5, 260, 261, 300])


def template(rng: random.Random, bench: Bench) -> None:
    """A Jinja template by a grammar of what such templates use and of what leads out of them."""
    from treadle.text.templates import ChatTemplate

    text = "".join(_block(rng, 0) for _ in range(rng.randint(1, 4)))
    if rng.random() < 0.1:
        text = torn(rng, text.encode()).decode("utf-8", "replace")
    made = ChatTemplate(text, name="fuzzed", special_tokens={"bos_token": "<bos>"})
    assert isinstance(made.render(MESSAGES, extra={"thinking": True}), str)


def _block(rng: random.Random, depth: int) -> str:
    if depth > 3 or rng.random() < 0.2:
        return rng.choice(("", "text", "{{ m }}", "{{- m.role ~ m['content'] -}}", "{{ messages | tojson }}"))
    inner = lambda: _block(rng, depth + 1)  # noqa: E731
    e = lambda: _expression(rng, depth)  # noqa: E731
    return rng.choice(
        (
            lambda: f"{{{{ {e()} }}}}",
            lambda: f"{{% for m in {e()} %}}{inner()}{{% endfor %}}",
            lambda: f"{{% for m in messages recursive %}}{inner()}{{{{ loop(messages) }}}}{{% endfor %}}",
            lambda: f"{{% if {e()} %}}{inner()}{{% else %}}{inner()}{{% endif %}}",
            lambda: f"{{% set x = {e()} %}}{inner()}",
            lambda: f"{{% set n = namespace(a={e()}) %}}{{% set n.a = n.a ~ n.a %}}{{{{ n.a }}}}",
            lambda: f"{{% macro f(a) %}}{inner()}{{{{ f(a) if a else '' }}}}{{% endmacro %}}{{{{ f({e()}) }}}}",
            lambda: f"{{% generation %}}{inner()}{{% endgeneration %}}",
            lambda: f"{{% filter {rng.choice(_FILTERS)} %}}{inner()}{{% endfilter %}}",
            lambda: f"{{% call(a) f() %}}{inner()}{{% endcall %}}",
            lambda: f"{{% include {e()} %}}",
        )
    )()


_FILTERS = words(
    "upper trim tojson length list join first last reverse sort unique batch(3) slice(3) indent(9) center(999) "
    "wordwrap(1) replace('a','aa') map(attribute='role') map('upper') selectattr('role') groupby('role') format(1) "
    "urlize xmlattr pprint random round int float sum string attr('__class__') default('x') dictsort items "
    "truncate(3) striptags e"
)
_ATOMS = words(
    "messages m loop self bos_token add_generation_prompt tools thinking x n f cycler joiner lipsum dict range "
    "namespace raise_exception strftime_now none true 0 1 -1 99999 1e308 10**9 '' 'a' 'a'*9999 [] [0]*9999 {} {'a':1} "
    "messages[0] messages[-1].content messages[0]['role'] m.content m.__class__ messages.__class__.__mro__ "
    "''.__class__ range(99999) range(9,0,-1) dict(a=1) lipsum.__globals__ cycler.__init__.__globals__ self.__init__ "
    "messages|list"
)
_TAME = [
    "messages",
    "messages[0].content",
    "messages|length",
    "bos_token",
    "m.role|default('')",
    "'a'",
    "1",
    "true",
    "[1,2]",
    "{'a':1}",
    "range(3)",
]
_METHODS = ("format", "join", "split", "strip", "replace", "items", "zfill", "center")
_OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "not in", "and", "or", "is defined and", "|")


def _expression(rng: random.Random, depth: int) -> str:
    atom = rng.choice(_ATOMS if rng.random() < 0.4 else _TAME)
    if depth > 2 or rng.random() < 0.5:
        return atom
    other = lambda: _expression(rng, depth + 1)  # noqa: E731
    return rng.choice(
        (
            lambda: f"{atom}|{rng.choice(_FILTERS)}",
            lambda: f"({other()}) {rng.choice(_OPERATORS[:-1])} ({other()})",
            lambda: f"{atom}({other()})",
            lambda: f"({other()})[{other()}:{other()}]",
            lambda: f"({other()})[{other()}]",
            lambda: f"({other()}).{rng.choice(_METHODS)}({other()})",
            lambda: f"{other()} if {other()} else {other()}",
            lambda: f"[{other()}, {other()}]",
            lambda: repr(rng.choice(TEXTS[:24])) if rng.random() < 0.5 else json.dumps(value(rng))[:200],
        )
    )()


KINDS: dict[str, Callable[[random.Random, Bench], None]] = {
    "template": template,
    "safetensors": safetensors,
    "gguf": gguf,
    "config": config,
    "tokenizer": tokenizer,
}
LIMITED = frozenset({"template", "tokenizer"})
"""Kinds that the server reads in processes with limits of time and memory: a case that needs more ends there."""


def tried(kind: str, rng: random.Random, bench: Bench) -> str:
    """`ok`, `refused` with a typed error of one line, `limit` of memory, or what is wrong."""
    try:
        KINDS[kind](rng, bench)
    except TreadleError as error:
        lines = error.message.splitlines()
        return (
            "refused" if len(lines) == 1 and len(lines[0]) < 3000 else f"wrong: not one line: {error.message[:300]!r}"
        )
    except MemoryError:
        return "limit" if kind in LIMITED else "wrong: MemoryError"
    except BaseException as error:  # a panic of a tokenizer is no Exception
        place: Any = error.__traceback__
        while place.tb_next is not None:
            place = place.tb_next
        where = f"{place.tb_frame.f_code.co_filename}:{place.tb_lineno}"
        return f"wrong: {type(error).__name__}: {' '.join(str(error).split())[:300]} at {where}"
    return "ok"
