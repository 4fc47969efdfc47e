"""What tenants and adapters may be called."""

from peftkit.artifact import NAME
from peftkit.errors import InputError


def check_name(name: str) -> None:
    """Raises InputError (field "name") for what can't be an adapter's or a tenant's name."""
    if not NAME.fullmatch(name):
        raise InputError(
            f"{name[:140]!r} can't be a name: use 1 to 128 letters, digits, '.', '_' and '-', not dots alone",
            field="name",
        )
