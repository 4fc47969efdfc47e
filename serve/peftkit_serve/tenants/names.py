"""What tenants and adapters may be called."""

import re

from peftkit.errors import InputError

_NAME = re.compile(r"(?!\.+$)[A-Za-z0-9._-]{1,128}")


def check_name(name: str) -> None:
    """Raises InputError (field "name") for what can't be an adapter's or a tenant's name."""
    if not _NAME.fullmatch(name):
        raise InputError(
            f"{name[:140]!r} can't be a name: use 1 to 128 letters, digits, '.', '_' and '-', not dots alone",
            field="name",
        )
