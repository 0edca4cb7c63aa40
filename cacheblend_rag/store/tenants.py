"""Names tenants: users of one engine or server who must not see, or notice, each other's chunks and KV."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend_rag.errors import InputError
from cacheblend_rag.store.private import make_inside

DEFAULT_NAME = "default"
"""The tenant of whoever names none; its KV lies under the keys that it had before there were tenants."""

MAX_READS = 6
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class Tenant:
    """Says whose chunks and KV a request may use.

    Attributes:
        name: The tenant; what it registers and stores is its own. 1 to 63 of a-z, 0-9, ``.``, ``_`` and ``-``.
        reads: Tenants whose chunks and KV it may use, too, and not change; up to :data:`MAX_READS`.

    Raises:
        InputError: A name that cannot be one, or too many.
    """

    name: str = DEFAULT_NAME
    reads: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what cannot be a name."""
        for name in (self.name, *self.reads):
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise InputError(
                    f"{name!r} cannot name a tenant: give 1 to 63 of a-z, 0-9, '.', '_' and '-', with a letter or digit at "
                    "both ends."
                )
        if self.name in self.reads or len(set(self.reads)) < len(self.reads) or len(self.reads) > MAX_READS:
            raise InputError(
                f"The tenant {self.name!r} reads {list(self.reads)}; name up to {MAX_READS} other tenants, each once."
            )

    def salt(self, own: str | None = None) -> str | None:
        """Return the salt of vLLM's prefix cache for a prompt of this tenant that has a salt of its ``own``, or none."""
        if self.name == DEFAULT_NAME:
            return own
        return f"tenant:{self.name}" if own is None else f"tenant:{self.name}:{own}"  # no name has a colon

    def to_params(self) -> dict[str, Any]:
        """Return JSON values that :meth:`from_params` reads; nothing for the default tenant alone."""
        return {} if self == DEFAULT else {"tenant": {"name": self.name, "reads": list(self.reads)}}

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Tenant:
        """Read a tenant.

        Raises:
            KeyError, TypeError, InputError: It is malformed.
        """
        given = params.get("tenant")
        return cls() if given is None else cls(given["name"], tuple(given["reads"]))


def home_of(store: Path, tenant: str) -> Path:
    """Return the directory of a tenant's own index: the store's for the default tenant, else one inside it.

    Raises:
        InputError: A name that cannot be a tenant's.
    """
    name = Tenant(tenant).name
    return store if name == DEFAULT_NAME else store / "tenants" / name


def make_home(store: Path, tenant: str) -> None:
    """Make that directory in an existing store, with the store's permissions.

    Raises:
        InputError: A name that cannot be a tenant's.
        OSError: It cannot be made.
    """
    home = home_of(store, tenant)
    if home != store:
        make_inside(home.parent)
        make_inside(home)


DEFAULT = Tenant()
"""The default tenant, which reads no other."""
