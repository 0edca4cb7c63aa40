"""Names namespaces: parts of a store whose readers must not see, or notice, what stands in another part."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from cacheblend_rag.errors import InputError
from cacheblend_rag.store.files import make_inside

DEFAULT_NAME = "default"
"""The namespace of whoever names none; the keys of its entries do not hold its name."""

MAX_READS = 6
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class Namespace:
    """Says where chunks and KV are written, and where else they are looked for: what one tenant has of a server.

    Attributes:
        name: What is registered and stored goes under it. 1 to 63 of a-z, 0-9, ``.``, ``_`` and ``-``.
        reads: Namespaces whose chunks and KV are used, too, and not changed; up to :data:`MAX_READS`.

    Raises:
        InputError: A name that cannot be one, or too many.
    """

    name: str = DEFAULT_NAME
    reads: tuple[str, ...] = ()

    def __post_init__(self) -> None:
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
        """Return the salt of vLLM's prefix cache for a prompt from here that has a salt of its ``own``, or none."""
        if self.name == DEFAULT_NAME:
            return own
        return f"tenant:{self.name}" if own is None else f"tenant:{self.name}:{own}"  # no name has a colon


def home_of(store: Path, namespace: str) -> Path:
    """Return the directory of a namespace's own index: the store's for the default one, else one inside it.

    Raises:
        InputError: A name that cannot be one.
    """
    name = Namespace(namespace).name
    return store if name == DEFAULT_NAME else store / "tenants" / name


def make_home(store: Path, namespace: str) -> None:
    """Make that directory in an existing store, with the store's permissions.

    Raises:
        InputError: A name that cannot be one.
        OSError: It cannot be made.
    """
    home = home_of(store, namespace)
    if home != store:
        make_inside(home.parent)
        make_inside(home)


DEFAULT = Namespace()
"""The default namespace, which reads no other."""
