"""The mask and score modification of an attention, by name and parameters.

Owns the names, their parameters and the canonical text. Does not compute anything: the masks
themselves are in ``tuner.families.pattern_torch`` and ``pattern_cute``.

    >>> str(parse("causal & document(mean=2048)"))
    'causal & document(mean=2048,seed=0)'
    >>> str(parse("sliding_window(1024) + softcap(30)"))
    'sliding_window(window=1024) + softcap(cap=30.0)'

Positions: query i and key j, with i shifted by ``seqlen_k - seqlen_q`` (bottom-right aligned, as
FlashAttention has it). A masked entry does not take part in the softmax.

=================  =========================================================================
name               meaning
=================  =========================================================================
full               every j
causal             j <= i
sliding_window     causal, and i - j < window (Mistral's and Gemma's window)
prefix_lm          j <= i or j < prefix
document           i and j lie in the same packed document
softcap            cap * tanh(score / cap), applied to the scaled score
alibi              score - 2**(-8 (h + 1) / heads_q) * |i - j|, applied after softcap
=================  =========================================================================
"""

from __future__ import annotations

import difflib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from tuner.errors import PatternError

Value = int | float | tuple[int, ...]

MASKS = ("full", "causal", "sliding_window", "prefix_lm", "document")
SCORES = ("softcap", "alibi")
MAX_TEXT = 1_000_000  # characters: a text of 100,000 documents' lengths
MAX_PIECES = 64
MAX_DOCUMENTS = 100_000  # of one sequence


@dataclass(frozen=True)
class Part:
    """One named piece of a pattern, with its parameters in canonical order."""

    name: str
    params: tuple[tuple[str, Value], ...] = ()

    def __str__(self) -> str:
        if not self.params:
            return self.name
        return f"{self.name}({','.join(f'{k}={_value_text(v)}' for k, v in self.params)})"

    def __getitem__(self, key: str) -> Value:
        return dict(self.params)[key]


@dataclass(frozen=True)
class Pattern:
    """Masks that are all applied (``&``), then score modifications in order (``+``)."""

    masks: tuple[Part, ...] = ()
    scores: tuple[Part, ...] = ()

    def __str__(self) -> str:
        masks = " & ".join(map(str, self.masks)) or "full"
        return " + ".join([masks, *map(str, self.scores)])

    def mask(self, name: str) -> Part | None:
        """Return the mask called ``name``, or None."""
        return next((p for p in self.masks if p.name == name), None)

    def score(self, name: str) -> Part | None:
        """Return the score modification called ``name``, or None."""
        return next((p for p in self.scores if p.name == name), None)

    @property
    def mask_names(self) -> frozenset[str]:
        return frozenset(p.name for p in self.masks)


def parse(text: str) -> Pattern:
    """Read a pattern such as ``causal & document(mean=512) + softcap(30)``.

    Raises:
        PatternError: naming the piece that is wrong and what is known.
    """
    if not isinstance(text, str) or not text.strip():
        raise PatternError(f"pattern {text!r} is empty; write one of {', '.join(MASKS)}")
    if len(text) > MAX_TEXT or text.count("+") + text.count("&") > MAX_PIECES:
        raise PatternError(
            f"pattern {text[:40]!r}... has {len(text)} characters; at most {MAX_TEXT}, and {MAX_PIECES} of & and +"
        )
    first, *rest = _split(text, "+")
    pieces = [_part(p, MASKS + SCORES) for chunk in (first, *rest) for p in _split(chunk, "&")]
    masks = [p for p in pieces if p.name in MASKS and p.name != "full"]
    scores = [p for p in pieces if p.name in SCORES]
    for p in pieces:
        if sum(q.name == p.name for q in pieces) > 1:
            raise PatternError(f"pattern {text!r} names {p.name} twice; name each piece once")
    if len(pieces) > 1 and any(p.name == "full" for p in pieces) and masks:
        raise PatternError(f"pattern {text!r} combines full with a mask; leave full out")
    names = {p.name for p in masks}
    if {"causal", "prefix_lm"} <= names:
        raise PatternError(
            f"pattern {text!r} combines causal with prefix_lm, which contains it; write prefix_lm(...) alone"
        )
    if "sliding_window" in names:  # a sliding window is causal already
        masks = [p for p in masks if p.name != "causal"]
    return Pattern(
        tuple(sorted(masks, key=lambda p: MASKS.index(p.name))),
        tuple(sorted(scores, key=lambda p: SCORES.index(p.name))),
    )


def document_lengths(part: Part, seqlen: int) -> tuple[int, ...]:
    """Return the lengths of the packed documents of one sequence; they sum to ``seqlen``.

    With ``mean`` and ``seed`` they are drawn uniformly from [mean / 2, 3 mean / 2], so that the
    draw depends on nothing but these numbers (Python's Mersenne Twister, the same everywhere).

    Raises:
        PatternError: if given lengths do not sum to ``seqlen``.
    """
    params = dict(part.params)
    if "lengths" in params:
        given = params["lengths"]
        assert isinstance(given, tuple)
        if sum(given) != seqlen:
            raise PatternError(f"{part} sums to {sum(given)}, not to seqlen {seqlen}; make them agree")
        return given
    mean, seed = int(params["mean"]), int(params["seed"])  # type: ignore[arg-type]
    if seqlen // mean > MAX_DOCUMENTS:
        raise PatternError(f"{part} makes over {MAX_DOCUMENTS} documents of seqlen {seqlen}; raise mean")
    rng, out, left = random.Random(seed), [], seqlen
    while left > 0:
        n = min(left, rng.randint(max(1, mean // 2), mean + mean // 2))
        out.append(n)
        left -= n
    return tuple(out)


def _split(text: str, mark: str) -> list[str]:
    """Split at ``mark`` outside parentheses."""
    return [p.strip() for p in re.split(rf"{re.escape(mark)}(?![^(]*\))", text)]


def _part(text: str, known: tuple[str, ...]) -> Part:
    m = re.fullmatch(r"([A-Za-z_]\w*)\s*(?:\((.*)\))?", text, flags=re.DOTALL)
    if not m:
        raise PatternError(f"cannot read {text!r} in a pattern; write name or name(number), as in sliding_window(1024)")
    name, inside = m[1], m[2]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise PatternError(f"unknown pattern {name!r}; {hint}")
    args = _arguments(name, inside or "")
    return Part(name, _READERS[name](args, text))


def _arguments(name: str, inside: str) -> dict[str, str]:
    """Map parameter names to their raw text; a bare first value takes the pattern's first name."""
    first = {"sliding_window": "window", "prefix_lm": "prefix", "document": "lengths", "softcap": "cap"}
    args: dict[str, str] = {}
    for i, item in enumerate(_split_top(inside)):
        key, eq, value = item.partition("=")
        if not eq:
            if i or name not in first:
                raise PatternError(f"cannot read {item!r} in {name}({inside}); write it as name=value")
            key, value = first[name], item
        if key.strip() in args:
            raise PatternError(f"{name}({inside}) gives {key.strip()} twice; give it once")
        args[key.strip()] = value.strip()
    return args


def _split_top(text: str) -> list[str]:
    return [p.strip() for p in re.split(r",(?![^\[]*\])", text) if p.strip()]


def _int(args: dict[str, str], key: str, whole: str, *, low: int, default: int | None = None) -> int:
    raw = args.pop(key, None)
    if raw is None and default is not None:
        return default
    try:
        value = int(raw if raw is not None else "")
    except ValueError:
        raise PatternError(
            f"{whole!r} needs {key} as a whole number, as in {whole.partition('(')[0]}({key}=1024)"
        ) from None
    if value < low:
        raise PatternError(f"{key} is {value} in {whole!r}; it must be at least {low}")
    return value


def _no_more(args: dict[str, str], whole: str) -> None:
    if args:
        raise PatternError(f"{whole!r} has the unknown parameter {next(iter(args))!r}; leave it out")


def _nothing(args: dict[str, str], whole: str) -> tuple[tuple[str, Value], ...]:
    _no_more(args, whole)
    return ()


def _one_int(key: str) -> Callable[[dict[str, str], str], tuple[tuple[str, Value], ...]]:
    def read(args: dict[str, str], whole: str) -> tuple[tuple[str, Value], ...]:
        value = _int(args, key, whole, low=1)
        _no_more(args, whole)
        return ((key, value),)

    return read


def _softcap(args: dict[str, str], whole: str) -> tuple[tuple[str, Value], ...]:
    raw = args.pop("cap", "")
    _no_more(args, whole)
    try:
        cap = float(raw)
    except ValueError:
        raise PatternError(f"{whole!r} needs cap as a number, as in softcap(30)") from None
    if not 0 < cap < float("inf"):
        raise PatternError(f"cap is {raw} in {whole!r}; it must be positive and finite")
    return (("cap", cap),)


def _document(args: dict[str, str], whole: str) -> tuple[tuple[str, Value], ...]:
    if "lengths" in args:
        raw = args.pop("lengths").strip("[] ")
        _no_more(args, whole)
        try:
            lengths = tuple(int(x) for x in re.split(r"[,;\s]+", raw) if x)
        except ValueError:
            raise PatternError(
                f"{whole!r} needs lengths as whole numbers, as in document(lengths=[512,1536])"
            ) from None
        if not lengths or min(lengths) < 1:
            raise PatternError(f"{whole!r} has a document shorter than 1; every length must be at least 1")
        return (("lengths", lengths),)
    mean = _int(args, "mean", whole, low=1)
    seed = _int(args, "seed", whole, low=0, default=0)
    _no_more(args, whole)
    return (("mean", mean), ("seed", seed))


def _value_text(v: Value) -> str:
    return f"[{','.join(map(str, v))}]" if isinstance(v, tuple) else repr(v)


_READERS: dict[str, Callable[[dict[str, str], str], tuple[tuple[str, Value], ...]]] = {
    "full": _nothing,
    "causal": _nothing,
    "sliding_window": _one_int("window"),
    "prefix_lm": _one_int("prefix"),
    "document": _document,
    "softcap": _softcap,
    "alibi": _nothing,
}
