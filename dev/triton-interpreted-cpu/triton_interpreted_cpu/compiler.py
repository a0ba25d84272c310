"""No compiler: with TRITON_INTERPRET=1 Triton runs kernels as Python."""

from __future__ import annotations

from typing import Any, NoReturn

from triton.backends.compiler import BaseBackend

_REMEDY = "the backend triton_interpreted_cpu compiles nothing: set TRITON_INTERPRET=1"


class InterpretedBackend(BaseBackend):  # type: ignore[misc]
    @staticmethod
    def supports_target(target: Any) -> bool:
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        return "interpreted"

    def parse_options(self, options: Any) -> NoReturn:
        raise RuntimeError(_REMEDY)

    def add_stages(self, stages: Any, options: Any, language: Any) -> NoReturn:
        raise RuntimeError(_REMEDY)

    def load_dialects(self, context: Any) -> None:
        pass

    def get_module_map(self) -> dict[str, Any]:
        return {}
