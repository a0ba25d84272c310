"""HTML and SVG elements as strings.

What stands inside an element is `Markup`, and only `text` makes Markup of plain words: the type
checker sees to it that nothing comes in unescaped.
"""

from __future__ import annotations

from html import escape


class Markup(str):
    """Escaped already."""

    __slots__ = ()


_VOID = frozenset({"meta", "br"})


def tag(name: str, /, *children: Markup, **attributes: str | float | None) -> Markup:
    """One element. `class_` is `class`, `stroke_width` is `stroke-width`; None leaves one out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{given}>")
    return Markup(f"<{name}{given}>{''.join(children)}</{name}>")


def text(words: str) -> Markup:
    return Markup(escape(words))


def joined(parts: list[Markup]) -> Markup:
    return Markup("".join(parts))


def _value(value: str | float) -> str:
    return escape(f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value))
