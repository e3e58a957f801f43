"""Random walks over the masks of generated JSON Schemas, with real vocabularies: is every answer valid, and ended?

    python benchmarks/walks.py --tokenizer demo=FOLDER/tokenizer.json:1,106 --tokenizer llama3=FILE:128009
        [--schemas 1000]

A tokenizer is named NAME=FILE:IDS, with the ids of its end tokens; `vocabularies.py` writes three. Each schema gets one
walk for each vocabulary: at every step a token is drawn from those that the row's mask allows, half of the time from
the short ones. No model is needed, and none is as unruly. With `close_at_limit` every walk must end and be valid; with
it off those that reach the limit are counted apart. Texts are checked with the package jsonschema, formats too. Exit
code 1 for an answer that is not valid, or not ended with `close_at_limit`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.schemas import schema_of

from treadle.core.grammar_state import GrammarState
from treadle.core.messages import Constraint, Submit
from treadle.errors import TreadleError
from treadle.grammar.build import build
from treadle.grammar.compiler import GrammarCompiler
from treadle.grammar.vocabulary import read_vocabulary
from treadle.runner.sampling.constraints import RowConstraint, row_constraint
from treadle.runner.sampling.token_masks import TokenMasks

SHOWN = 5


@dataclass
class Vocabulary:
    """A tokenizer for walks. `short` marks the tokens of one byte."""

    name: str
    compiler: GrammarCompiler
    size: int
    stop_ids: tuple[int, ...]
    short: Any

    @classmethod
    def read(cls, argument: str) -> Vocabulary:
        name, _, rest = argument.partition("=")
        path, _, ids = rest.rpartition(":")
        stop_ids = tuple(int(id_) for id_ in ids.split(","))
        size = max(Tokenizer.from_file(path).get_vocab().values()) + 1
        tokenizer = read_vocabulary(Path(path), size=size, eos_token_ids=stop_ids)
        short = np.array([len(tokenizer.decode_bytes([token])) == 1 for token in range(size)])
        return cls(name, GrammarCompiler(tokenizer), size, stop_ids, short)

    def decode(self, tokens: list[int]) -> bytes:
        assert self.compiler.tokenizer is not None
        return bytes(self.compiler.tokenizer.decode_bytes(tokens))


@dataclass
class Walk:
    """Result of one walk: its text, the tokens of it, and its end: "stop", "length" or a failure."""

    text: bytes
    tokens: int
    end: str


def walk(vocabulary: Vocabulary, constraint: Constraint, seed: int, max_tokens: int) -> Walk:
    """Draw tokens from the masks of one row until it ends."""
    while (status := vocabulary.compiler.state(constraint)).state is GrammarState.PENDING:
        time.sleep(0.0005)
    if status.state is GrammarState.FAILED:
        return Walk(b"", 0, f"refused by the engine: {status.message}")
    request = Submit(
        id="1", prompt=(1,), max_tokens=max_tokens, stop_token_ids=vocabulary.stop_ids, constraint=constraint
    )
    row = row_constraint(request, (), vocabulary.size, vocabulary.compiler)
    assert row is not None
    rng, masks, tokens = random.Random(seed), TokenMasks(vocabulary.size), list[int]()
    while len(tokens) < max_tokens:
        drawn = _draw(vocabulary, masks, row, rng)
        if drawn is None or row.failure:
            return Walk(vocabulary.decode(tokens), len(tokens), f"failed: {row.failure or 'no token is allowed'}")
        token = row.settle(drawn)
        row.accept(token)
        if token not in vocabulary.stop_ids:
            tokens.append(token)
        if row.ended:
            return Walk(vocabulary.decode(tokens), len(tokens), "stop")
    return Walk(vocabulary.decode(tokens), len(tokens), "length")


def _draw(vocabulary: Vocabulary, masks: TokenMasks, row: RowConstraint, rng: random.Random) -> int | None:
    words = masks.fill([row])[0]
    allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: vocabulary.size].astype(bool)
    if rng.random() < 0.5:
        short = allowed & vocabulary.short
        allowed = short if short.any() else allowed
    ids = np.flatnonzero(allowed)
    return int(ids[rng.randrange(len(ids))]) if len(ids) else None


def judge(result: Walk, validator: Any) -> str:
    """Return "valid", "length" or the failure of a walk."""
    if result.end != "stop":
        return result.end
    try:
        value = json.loads(result.text)
    except ValueError as error:
        return f"not JSON: {error}"
    found = next(validator.iter_errors(value), None)
    return "valid" if found is None else f"not valid: {found.message[:120]}"


@dataclass
class Tally:
    """Outcomes of the walks of one vocabulary; `shown` describes the first bad ones."""

    outcomes: Counter[str]
    tokens: int = 0
    seconds: float = 0.0

    def add(self, outcome: str, result: Walk, seconds: float) -> None:
        self.outcomes[outcome if outcome in ("valid", "length") else "bad"] += 1
        self.tokens += result.tokens
        self.seconds += seconds


def run(vocabulary: Vocabulary, numbers: range, max_tokens: int, *, close: bool) -> Tally:
    tally, bad, refused = Tally(Counter()), 0, 0
    for number in numbers:
        schema = schema_of(number)
        try:
            constraint = build("json_schema", schema, param="schema", close_at_limit=close)
        except TreadleError as error:
            refused += 1
            if refused <= SHOWN:
                print(f"# schema {number} is refused: {error}")
            continue
        began = time.perf_counter()
        result = walk(vocabulary, constraint, number, max_tokens)
        outcome = judge(result, Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER))
        tally.add(outcome, result, time.perf_counter() - began)
        if outcome != "valid" and (close or outcome != "length"):
            bad += 1
            if bad <= SHOWN:
                print(f"# schema {number}, {vocabulary.name}: {outcome}\n#   {result.text[-160:]!r}")
    tally.outcomes["refused"] = refused
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", action="append", required=True, metavar="NAME=FILE:IDS")
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, metavar="NUMBER", help="of the schemas")
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--close", choices=("on", "off", "both"), default="both", help="close_at_limit")
    options = parser.parse_args()
    lines, passed = [], True
    numbers = range(options.first, options.first + options.schemas)
    for argument in options.tokenizer:
        vocabulary = Vocabulary.read(argument)
        for close in (True, False):
            if options.close in ("both", "on" if close else "off"):
                tally = run(vocabulary, numbers, options.max_tokens, close=close)
                passed = passed and not tally.outcomes["bad"] and not (close and tally.outcomes["length"])
                lines.append(_line(vocabulary, tally, close=close))
                print(lines[-1], flush=True)
    print("\n| vocabulary | tokens | close_at_limit | valid and ended | length | bad | refused | drawn | µs a token |")
    print("|---|---|---|---|---|---|---|---|---|")
    print("\n".join(lines))
    sys.exit(not passed)


def _line(vocabulary: Vocabulary, tally: Tally, *, close: bool) -> str:
    counts = [tally.outcomes[name] for name in ("valid", "length", "bad", "refused")]
    each = tally.seconds / max(1, tally.tokens) * 1e6
    cells = (
        vocabulary.name,
        f"{vocabulary.size:,}",
        "on" if close else "off",
        *counts,
        f"{tally.tokens:,}",
        f"{each:.0f}",
    )
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
