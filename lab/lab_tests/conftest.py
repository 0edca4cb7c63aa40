"""Brings the fixtures and hooks of the root's tests to those of the lab."""

from __future__ import annotations

from tests.conftest import *  # noqa: F403
from tests.conftest import _blends  # noqa: F401
