"""Layout options: how a target's rows are divided into files, and its own Delta properties."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Self, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from waldelta.config.parse_text import StrictModel, refuse_if
from waldelta.metadata_columns import METADATA_TYPES

_SIZE = re.compile(r"\A([1-9]\d{0,5}) ?(kb|mb|gb)\Z", re.IGNORECASE)
_UNITS = {"kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}
_LEAST_FILE = 64 << 10
# Options that exclude each other.
_RIVALS = {
    "partition_by": ("cluster_by",),
    "cluster_by": ("partition_by", "z_order"),
    "z_order": ("cluster_by",),
}


def _size(value: str) -> str:
    refuse_if(not _SIZE.match(value), "a number and kb, mb or gb is needed, such as 64mb")
    refuse_if(_bytes(value) < _LEAST_FILE, "at least 64kb is needed")
    return value


def _bytes(value: str) -> int:
    number, unit = value[:-2], value[-2:].lower()
    return int(number) * _UNITS[unit]


def _names(value: tuple[str, ...]) -> tuple[str, ...]:
    refuse_if(len(set(value)) < len(value), "each column is named once")
    names = [name for name in value if name in METADATA_TYPES]
    refuse_if(names, f"{', '.join(names)} is waldelta's own column: name columns of the source")
    return value


Columns: TypeAlias = Annotated[tuple[str, ...], AfterValidator(_names)]


class LayoutOptions(StrictModel):
    """How a target is laid out; None where the pipeline's default applies."""

    partition_by: Columns | None = Field(
        None,
        description="columns whose values divide the target into partitions; [] for none",
    )
    cluster_by: Annotated[Columns, Field(max_length=4)] | None = Field(
        None,
        description=(
            "columns by which maintenance clusters the target's rows (liquid clustering), up to"
            " four, once a tenth of them is new; [] for none"
        ),
    )
    z_order: Annotated[Columns, Field(max_length=4)] | None = Field(
        None,
        description=(
            "columns by whose Z-order maintenance sorts the target's rows, up to four, once a tenth"
            " of them is new; [] for none"
        ),
    )
    file_size: Annotated[str, AfterValidator(_size)] | None = Field(
        None,
        description=(
            "size at which a new data file ends, such as 64mb; by default 250,000 rows a file"
        ),
    )
    statistics: Columns | None = Field(
        None,
        description=(
            "columns whose least and greatest values each file's log entry has; by default Delta's"
            " first 32"
        ),
    )
    properties: dict[str, str] = Field(
        {}, description="further properties of the table, by name, such as those of Delta Lake"
    )

    @model_validator(mode="after")
    def _one_layout(self) -> Self:
        refuse_if(
            self.partition_by and self.cluster_by,
            "partition_by and cluster_by exclude each other: Delta clusters no partitioned table",
        )
        refuse_if(
            self.z_order and self.cluster_by,
            "z_order and cluster_by exclude each other: Delta sorts a clustered table itself",
        )
        both = [name for name in self.z_order or () if name in (self.partition_by or ())]
        refuse_if(
            both,
            f"{', '.join(both)} has one value in each partition: name it under partition_by or"
            " z_order",
        )
        for key in ("cluster_by", "z_order"):
            columns = getattr(self, key) or ()
            left_out = [name for name in columns if name not in (self.statistics or ())]
            refuse_if(
                self.statistics is not None and left_out,
                f"{key} needs statistics of its columns: add {', '.join(left_out)} to statistics",
            )
        return self

    @property
    def layout_columns(self) -> set[str]:
        """The columns that any of the options names."""
        columns = (self.partition_by, self.cluster_by, self.z_order, self.statistics)
        return {column for names in columns for column in names or ()}

    @property
    def divided_by(self) -> Sequence[str] | None:
        """The partition columns that a target gets; None where it keeps those that it has."""
        # Delta clusters no partitioned table.
        return () if self.partition_by is None and self.cluster_by else self.partition_by

    @property
    def file_bytes(self) -> int | None:
        """Returns the size at which a file ends."""
        return None if self.file_size is None else _bytes(self.file_size)

    def over(self, default: LayoutOptions) -> LayoutOptions:
        """Returns these options where set, else the default's.

        By default, a target that has one of two options that exclude each other lacks the other.
        """
        names = list(LayoutOptions.model_fields)
        options = {name: getattr(self, name) for name in names} | {"properties": {}}
        values = {
            name: getattr(default, name)
            if value is None and not any(options[rival] for rival in _RIVALS.get(name, ()))
            else value
            for name, value in options.items()
        }
        return LayoutOptions(**values | {"properties": default.properties | self.properties})
