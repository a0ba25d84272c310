"""Fields of a far store's URL: its query, checked."""

from __future__ import annotations

from typing import TypeVar
from urllib.parse import parse_qsl, urlsplit

from pydantic import BaseModel, ValidationError

Fields = TypeVar("Fields", bound=BaseModel)


def fields_of(url: str, kind: type[Fields]) -> Fields:
    """The fields of a URL. Raises ValueError, which names the first one that is wrong."""
    query = urlsplit(url).query
    given = dict(parse_qsl(query, strict_parsing=bool(query)))
    try:
        return kind.model_validate(given)
    except ValidationError as e:
        first = e.errors()[0]
        raise ValueError(f"{first['loc'][0]!r}: {first['msg']}") from e
