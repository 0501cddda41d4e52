"""Type options: the lake's types for values that have several possible ones."""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field

from waldelta.config.parse_text import StrictModel, refuse_if

_DECIMAL = re.compile(r"\Adecimal\(38,([0-9]|[12][0-9]|3[0-8])\)\Z")


def _numeric(value: str) -> str:
    plain = value.replace(" ", "").lower()
    refuse_if(
        plain not in ("string", "double") and not _DECIMAL.match(plain),
        "string, double or decimal(38,s), where s from 0 to 38 is the digits behind the point",
    )
    return plain


NumericType: TypeAlias = Annotated[str, AfterValidator(_numeric)]
JsonType: TypeAlias = Literal["string", "variant"]

_NUMERIC_HELP = (
    "type of numeric columns without limits or with more than 38 digits: string, double or"
    " decimal(38,s)"
)
_JSON_HELP = (
    "type of json and jsonb columns; key columns and tables without a key always use string"
)
_TEXT_HELP = "names of columns that the lake stores as strings, as PostgreSQL prints them"


class TypeOptions(StrictModel, populate_by_name=True):
    """The types in force; a value that such a type can't store exactly is stored raw in
    ``_wd_raw``.
    """

    numeric: NumericType = Field("string", description=_NUMERIC_HELP)
    # BaseModel has a method named json.
    json_type: JsonType = Field("string", alias="json", description=_JSON_HELP)
    text: tuple[str, ...] = Field((), description=_TEXT_HELP)

    @property
    def need_raw(self) -> bool:
        """Returns whether these options may store a value only in ``_wd_raw``."""
        return (self.numeric, self.json_type) != ("string", "string")

    @property
    def numeric_scale(self) -> int | None:
        """Returns the scale of ``decimal(38,s)``; None for another option."""
        match = _DECIMAL.match(self.numeric)
        return int(match[1]) if match else None

    @property
    def comparable(self) -> TypeOptions:
        """Returns the options for key columns, without variant, because a variant has no
        equality.
        """
        return self.model_copy(update={"json_type": "string"})


class TableTypeOptions(StrictModel, populate_by_name=True):
    """One table's options; None where the pipeline's apply."""

    numeric: NumericType | None = Field(None, description=_NUMERIC_HELP)
    json_type: JsonType | None = Field(None, alias="json", description=_JSON_HELP)
    text: tuple[str, ...] | None = Field(None, description=_TEXT_HELP)

    def over(self, options: TypeOptions) -> TypeOptions:
        """Returns these options where set, else ``options``."""
        return options.model_copy(update=self.model_dump(exclude_none=True))


DEFAULT_TYPES = TypeOptions()
