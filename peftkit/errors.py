"""The errors a user can meet. Each message names the file, the field and the remedy, in one or two lines.

`InputError` and its children are the user's to mend (exit code 2); `RunError` is something that failed while
running (exit code 1). Broken invariants of our own are assertions, never these.
"""

import difflib
from collections.abc import Iterable


class PeftkitError(Exception):
    """Base of all errors that are shown to a user as one line, without a traceback."""

    exit_code = 1


class RunError(PeftkitError):
    """Something failed while running: no room on the disk, a port in use, a loss that is not finite."""


class InputError(PeftkitError):
    """Bad input. `field` is the name a user typed, where there is one: the HTTP service answers with it."""

    exit_code = 2

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class RecipeError(InputError):
    """A recipe that can't be read: unknown key, wrong type, a value out of range."""


class DataError(InputError):
    """A data file that can't be trained on; names the file and the line."""


class BaseModelError(InputError):
    """A base model that isn't there, is damaged, or whose architecture isn't supported."""


class AdapterError(InputError):
    """An adapter folder that is missing, damaged, or doesn't fit the model."""


class BaseMismatchError(AdapterError):
    """An adapter that was made for another base."""


class TooLargeError(AdapterError):
    """An adapter that is larger than what there is to hold it."""


class UnsupportedError(AdapterError):
    """A feature of an adapter that can't be honoured faithfully; it is refused by name, never ignored."""


def did_you_mean(name: str, candidates: Iterable[str], *, likeness: float = 0.5) -> str:
    """Returns "; did you mean 'x'?" for the candidate nearest to `name`, or "" when none is near.

    Names that share much anyway, as files their ending, need more `likeness` (1: they are the same).
    """
    near = difflib.get_close_matches(name, list(candidates), n=1, cutoff=likeness)
    return f"; did you mean '{near[0]}'?" if near else ""
