"""Brings the fixtures and hooks of the root's tests to the lab's tests."""

from __future__ import annotations

from tests.conftest import *  # noqa: F403
from tests.conftest import _blends  # noqa: F401
