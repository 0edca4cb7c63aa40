"""The compiler of the interpreted backend, which compiles nothing."""

from __future__ import annotations

from typing import Any

from triton.backends import compiler


class InterpretedBackend(compiler.BaseBackend):
    """A backend that refuses to compile."""

    @staticmethod
    def supports_target(target: compiler.GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "interpreted"

    def parse_options(self, options: dict[str, Any]) -> object:
        raise NotImplementedError("A kernel is to be compiled: TRITON_INTERPRET=1 is not set.")

    def add_stages(self, stages: Any, options: object, language: Any) -> None:
        raise NotImplementedError

    def load_dialects(self, context: Any) -> None:
        raise NotImplementedError

    def get_module_map(self) -> dict[str, Any]:
        return {}
