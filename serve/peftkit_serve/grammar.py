"""Answers held to a JSON schema: which tokens may come next, by llguidance.

A schema's keyword that can't be kept is refused by name, never ignored. Between a document's parts stands no more white
space than JSON's usual ", " and ": ", so that a model can't go on for ever inside an open one.
"""

import json
import logging
import threading
from functools import lru_cache
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerFast

from peftkit.errors import InputError, RunError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

logger = logging.getLogger(__name__)

MAX_SCHEMA_BYTES = 2**18
_MAX_BRANCHES = 10_000
"""Most ways on that a place in a document may have: an object of 2,400 optional properties has as many. More would hold
up the engine at each token."""
_NUM_COMPILED = 32
"""How many schemas are kept compiled."""
_TOO_LARGE = "the schema is too large to hold an answer to"
_SPACING: "JsonCompileOptions" = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class JsonConstraint:
    """Where one answer stands in its schema; a `plan.Constraint`."""

    def __init__(self, matcher: "LLMatcher") -> None:
        self._matcher = matcher

    def allowed(self) -> bytes:
        return self._matcher.compute_bitmask()

    def accept(self, token_id: int) -> None:
        """Raises RunError past a limit of llguidance's, after which it allows nothing but the end."""
        if not self._matcher.consume_token(token_id) or self._matcher.is_error():
            logger.warning("a schema could not be kept to: %s", _first_line(self._matcher.get_error()))
            raise RunError(_TOO_LARGE)

    @property
    def complete(self) -> bool:
        return self._matcher.is_stopped()


class Grammars:
    """Makes constraints for one tokenizer. May be used from any thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, vocab_size: int, eos_token_id: int | None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = eos_token_id
        self._lock = threading.Lock()
        self._table: LLTokenizer | None = None
        self._compiled = lru_cache(_NUM_COMPILED)(self._compile)

    def json(self, schema: str) -> JsonConstraint:
        """A constraint at the beginning of an answer. Raises InputError (field "json_schema")."""
        return JsonConstraint(self._compiled(schema).deep_copy())

    def _compile(self, schema: str) -> "LLMatcher":
        """A matcher at the beginning, to be copied for each answer: compiling takes a second for a large schema."""
        from llguidance import LLMatcher, LLParserLimits

        if len(schema) > MAX_SCHEMA_BYTES:
            raise _refused(f"it has {len(schema)} characters, {MAX_SCHEMA_BYTES} are allowed")
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, defaults=_SPACING)
        except (ValueError, RecursionError) as error:
            raise _refused(str(error)) from None
        limits = LLParserLimits(max_items_in_row=_MAX_BRANCHES, verbose_errors=False)
        matcher = LLMatcher(self._tokens(), grammar, log_level=0, limits=limits)
        if error := matcher.get_error():
            raise _refused(error)
        matcher.compute_bitmask()
        if matcher.is_stopped() and not matcher.is_error():  # no document is empty
            raise _refused("no document is valid by it")
        if _fails_at_once(matcher.deep_copy()):
            raise _refused(f"{_TOO_LARGE}: give its objects fewer properties, or require them")
        return matcher

    def _tokens(self) -> "LLTokenizer":
        """The vocabulary as llguidance reads it: made once, it takes seconds for a large one."""
        with self._lock:
            if self._table is None:
                from llguidance.hf import from_tokenizer

                self._table = from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=self._eos)
            return self._table


def any_object() -> str:
    """The schema of `{"type": "json_object"}`: any JSON object."""
    return json.dumps({"type": "object"})


def _fails_at_once(matcher: "LLMatcher") -> bool:
    """Whether a limit is passed within the first two tokens."""
    for _ in range(2):
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_stopped():
            break
        matcher.consume_token((allowed & -allowed).bit_length() - 1)  # the lowest one
    return matcher.is_error()


def _refused(reason: str) -> InputError:
    return InputError(f"the schema can't be kept: {_first_line(reason)}", field="json_schema")


def _first_line(reason: str) -> str:
    return next(iter(reason.strip().splitlines()), "unknown fault")[:300]
