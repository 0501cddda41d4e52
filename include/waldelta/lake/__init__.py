"""Everything that writes to Delta Lake: storage, layout, durability, statistics of data files."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.lake.delta_log import DeltaLog
    from waldelta.lake.delta_target import (
        READ_FAILURES,
        WRITE_FAILURES,
        CommitConflict,
        DeltaTarget,
        TableError,
        Tag,
        TargetVersion,
    )
    from waldelta.lake.lake import Lake
    from waldelta.lake.storage import (
        bookkeeping_uri,
        check_writable,
        target_uri,
        write_parquet,
    )

__all__ = [
    "READ_FAILURES",
    "WRITE_FAILURES",
    "CommitConflict",
    "DeltaLog",
    "DeltaTarget",
    "Lake",
    "TableError",
    "Tag",
    "TargetVersion",
    "bookkeeping_uri",
    "check_writable",
    "target_uri",
    "write_parquet",
]
__getattr__ = lazy_exports(
    __name__,
    delta_log="DeltaLog",
    delta_target=(
        "CommitConflict DeltaTarget TableError Tag TargetVersion READ_FAILURES WRITE_FAILURES"
    ),
    lake="Lake",
    storage="bookkeeping_uri check_writable target_uri write_parquet",
)
