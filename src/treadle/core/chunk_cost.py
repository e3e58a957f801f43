"""The cost of a prefill chunk, learned from measured chunks."""

from __future__ import annotations

CHUNK_S = 0.2
LONGEST_CHUNK_S = 0.6
WORTH_OVERHEADS = 4.0  # overheads that a chunk takes where nothing decodes
LEAST_OVERHEADS = 2.0  # the same, even beyond LONGEST_CHUNK_S
SLOWEST_CHUNK_S = 3.0  # the most for that, even if the overhead was taken for too high and all of it are tokens
FORGET = 0.9  # weight of the past against each new measurement
FORGET_FAST = 0.3  # the same, where the past is several times too high
MOST_OVERHEAD = 0.95  # of the mean chunk: no token is free
LEAST_SPREAD = 0.01  # of sizes, as a part of their mean square: below it they do not show the overhead
TELLING_SPREAD = 0.2  # the same: from here on the overhead is taken as fitted
LEAST_S = 1e-9  # of a token
OUTLIER = 2.5  # times the expected cost: one such chunk may be chance, and counts as this much


class ChunkCost:
    """Seconds of a prefill chunk as an affine function of its tokens: least squares with a fading memory. No token
    costs less than `least_s`."""

    def __init__(self, least_s: float = LEAST_S) -> None:
        self._least_s = least_s
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._overhead = 0.0
        self._tried = 0.0
        self._slow = False  # the chunk measured last
        self.told_apart = False  # sizes have differed enough to tell the overhead from the tokens

    def observe(self, tokens: int, seconds: float) -> None:
        self._tried = max(float(tokens), self._tried * FORGET)
        keep = FORGET
        if self.known:
            slow = seconds > OUTLIER * max(self.seconds(tokens), self._y / self._weight)
            self._slow, before = slow, self._slow
            if slow and not before:
                self._slow_down(1 + (1 - FORGET) * (OUTLIER - 1))
                return
            if OUTLIER * seconds < self.seconds(tokens):
                keep = FORGET_FAST
        self._weight = self._weight * keep + 1
        self._x = self._x * keep + tokens
        self._y = self._y * keep + seconds
        self._xx = self._xx * keep + tokens * tokens
        self._xy = self._xy * keep + tokens * seconds
        self._fit()

    def _slow_down(self, factor: float) -> None:
        """Scale the whole line: one slow chunk does not show whether overhead or tokens cost more."""
        self._y *= factor
        self._xy *= factor
        self._overhead *= factor

    @property
    def known(self) -> bool:
        return self._y > 0

    def _fit(self) -> None:
        """Fit the line; the overhead stays as it was found where sizes hardly differ."""
        spread = self._weight * self._xx - self._x * self._x
        part = spread / (self._xx * self._weight)
        if part > LEAST_SPREAD:
            per_token = max(0.0, (self._weight * self._xy - self._x * self._y) / spread)
            found = max(0.0, (self._y - per_token * self._x) / self._weight)
            trust = min(1.0, part / TELLING_SPREAD) if self.told_apart else 1.0
            self._overhead += trust * (found - self._overhead)
            self.told_apart = True

    def line(self) -> tuple[float, float]:
        """(overhead in seconds, seconds per token): the first not negative, the second positive."""
        mean, tokens = self._y / self._weight, self._x / self._weight
        overhead = max(0.0, min(self._overhead, MOST_OVERHEAD * mean, mean - self._least_s * tokens))
        return overhead, max(LEAST_S, (mean - overhead) / tokens)

    def seconds(self, tokens: int) -> float:
        overhead, per_token = self.line()
        return overhead + per_token * tokens

    def tokens_alone(self) -> int:
        """Tokens of a chunk where nothing decodes; another size than before while all were equal."""
        overhead, _ = self.line()
        tokens = self.tokens(max(CHUNK_S, min(LONGEST_CHUNK_S, WORTH_OVERHEADS * overhead)))
        each_s = max(LEAST_S, self._y / self._x)
        tokens = max(tokens, int(min(self.tokens(LEAST_OVERHEADS * overhead), SLOWEST_CHUNK_S / each_s)))
        return tokens if self.told_apart else max(tokens, int(2 * self._tried))

    def tokens(self, seconds: float) -> int:
        """Tokens that `seconds` pay for; at most twice as many as were tried lately, as the line may mislead."""
        return int(min(self.on_the_line(seconds), 2 * self._tried))

    def on_the_line(self, seconds: float) -> float:
        """Tokens that `seconds` pay for, however far the line is followed."""
        overhead, per_token = self.line()
        return max(0.0, seconds - overhead) / per_token
