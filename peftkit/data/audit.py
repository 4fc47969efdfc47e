"""What a person should see of data before it is trained on: which tokens are trained, how long samples are, what was
cut. What is wrong beyond doubt is an error, here and where rows are encoded (`encode`)."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from peftkit.data.dataset import Dataset, Encoding, Stream, collect, overlap
from peftkit.data.encode import Sample
from peftkit.data.formats import Row, read_rows, row_key
from peftkit.data.sources import Source

_BARS = 8
_BAR_WIDTH = 30


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of tokens that are all trained or all not."""

    text: str
    trained: bool


@dataclass(frozen=True, slots=True)
class Shown:
    """A sample, decoded."""

    where: str
    pieces: list[Piece]


@dataclass(frozen=True, slots=True)
class Bar:
    """Samples of a range of lengths."""

    shortest: int
    longest: int
    samples: int


@dataclass(frozen=True)
class Audit:
    """Figures of a data set."""

    name: str
    rows: int
    """Rows read."""
    encoded_rows: int
    """Rows that were drawn from them at random and encoded; what follows is about these."""
    samples: int
    tokens: int
    target_tokens: int
    truncated: int
    """Samples whose prompt's beginning or oldest turns were cut away."""
    dropped: int
    """Rows left out because their answer doesn't fit."""
    repeated: int
    """Rows that say the same as one before them."""
    lengths: list[Bar]
    """Histogram of the samples' tokens."""
    shown: list[Shown]
    streamed: bool = False
    """The rows are the first of a stream."""

    @property
    def trained_share(self) -> float:
        """Share of the tokens that are trained."""
        return self.target_tokens / self.tokens

    def text(self, *, color: bool = False) -> str:
        """The audit for a reader; trained tokens in colour, or in [[ ]]."""
        rows = f"{self.rows:,} rows"
        if self.streamed:
            rows = f"the first {rows} of a stream"
        elif self.encoded_rows < self.rows:
            rows += f", of which {self.encoded_rows:,} drawn at random were encoded"
        most = max(bar.samples for bar in self.lengths)
        width = len(f"{self.lengths[-1].longest:,}")
        lines = [
            f"{self.name}: {rows}, {self.samples:,} samples, {self.tokens:,} tokens, "
            f"{self.target_tokens:,} of them trained ({self.trained_share:.1%})",
            f"truncated {self.truncated:,}, dropped {self.dropped:,}, repeated {self.repeated:,}",
            "tokens of a sample",
            *(
                f"  {bar.shortest:>{width},} to {bar.longest:>{width},}  {bar.samples:>9,}  "
                + "█" * round(_BAR_WIDTH * bar.samples / most)
                for bar in self.lengths
            ),
        ]
        for sample in self.shown:
            legend = "trained tokens in colour" if color else "what is trained in [[ ]]"
            lines += [f"{sample.where}, {legend}:", _marked(sample.pieces, color)]
        return "\n".join(lines)


def audit(data: Dataset | Stream, tokenizer: PreTrainedTokenizerBase, *, num_shown: int = 1, seed: int = 0) -> Audit:
    """The figures of encoded data, and `num_shown` samples drawn by `seed`."""
    head = data.head if isinstance(data, Stream) else data
    return _audit(
        head, tokenizer, rows=head.num_rows, num_shown=num_shown, seed=seed, streamed=isinstance(data, Stream)
    )


def audit_source(
    source: Source, encoding: Encoding, *, max_rows: int | None, num_shown: int = 3, seed: int = 0
) -> tuple[Audit, dict[bytes, str]]:
    """Reads every row of a source, encodes at most `max_rows` of them drawn at random (None: all), and returns the
    figures and, for each distinct row's key, where it stands. Raises DataError for what is wrong with a row."""
    draw = random.Random(seed)
    kept: list[tuple[int, Row]] = []
    keys: dict[bytes, str] = {}
    num_rows = 0
    for index, row in enumerate(read_rows(source, encoding.format)):
        if not num_rows:
            encoding.compare_with_served(row)
        num_rows += 1
        keys.setdefault(row_key(row), row.where)
        if max_rows is None or len(kept) < max_rows:
            kept.append((index, row))
        elif (place := draw.randrange(num_rows)) < max_rows:  # each row stays with the same chance
            kept[place] = (index, row)
    encoded = (encoding.encode(row) for _, row in sorted(kept, key=lambda item: item[0]))
    data = collect(source, encoded, "", encoding.max_length)
    found = _audit(data, encoding.tokenizer, rows=num_rows, num_shown=num_shown, seed=seed)
    return found, keys


def check_overlap(train: Mapping[bytes, str], valid: Mapping[bytes, str]) -> None:
    """Raises DataError where a held-out row is a training row as well; both as the rows' keys and where they stand."""
    both = [key for key in valid if key in train]
    if both:
        raise overlap(valid[both[0]], train[both[0]], len(both) - 1)


def pieces(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Iterator[Piece]:
    """A sample's text in runs of trained and untrained tokens, special tokens shown."""
    tokens = zip(sample.ids.tolist(), sample.trained.tolist(), strict=True)
    for trained, run in groupby(tokens, key=lambda token: token[1]):
        yield Piece(str(tokenizer.decode([token for token, _ in run])), trained)


def _audit(
    data: Dataset, tokenizer: PreTrainedTokenizerBase, *, rows: int, num_shown: int, seed: int, streamed: bool = False
) -> Audit:
    chosen = sorted(random.Random(seed).sample(range(len(data.samples)), min(num_shown, len(data.samples))))
    samples = [data.samples[index] for index in chosen]
    return Audit(
        name=data.name,
        rows=rows,
        encoded_rows=data.num_rows,
        samples=len(data.samples),
        tokens=data.num_tokens,
        target_tokens=data.num_target_tokens,
        truncated=data.num_truncated,
        dropped=data.num_dropped,
        repeated=data.num_repeated,
        lengths=_histogram(data.lengths),
        shown=[Shown(sample.where, list(pieces(sample, tokenizer))) for sample in samples],
        streamed=streamed,
    )


def _histogram(lengths: Sequence[int]) -> list[Bar]:
    """At most `_BARS` equal ranges from the shortest to the longest."""
    shortest, longest = min(lengths), max(lengths)
    step = -(-(longest - shortest + 1) // _BARS)
    starts = range(shortest, longest + 1, step)
    counts = [0] * len(starts)
    for length in lengths:
        counts[(length - shortest) // step] += 1
    return [Bar(start, min(start + step - 1, longest), count) for start, count in zip(starts, counts, strict=True)]


def _marked(runs: Sequence[Piece], color: bool) -> str:
    if not color:
        return "".join(f"[[{piece.text}]]" if piece.trained else piece.text for piece in runs)
    from rich.console import Console
    from rich.text import Text

    text = Text()
    for piece in runs:
        text.append(piece.text, style="black on green" if piece.trained else "dim")
    console = Console(force_terminal=True, color_system="standard", soft_wrap=True, highlight=False)
    with console.capture() as captured:
        console.print(text, end="")
    return captured.get()
