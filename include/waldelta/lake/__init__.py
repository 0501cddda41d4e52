"""Everything that writes to Delta Lake: storage, layout, durability, statistics of data files."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.lake.delta_log import DeltaLog
    from waldelta.lake.lake import DeltaTarget, Lake
    from waldelta.lake.storage import (
        bookkeeping_uri,
        check_writable,
        files_of,
        target_uri,
        write_parquet,
    )

__all__ = [
    "DeltaLog",
    "DeltaTarget",
    "Lake",
    "bookkeeping_uri",
    "check_writable",
    "files_of",
    "target_uri",
    "write_parquet",
]
__getattr__ = lazy_exports(
    __name__,
    delta_log="DeltaLog",
    lake="DeltaTarget Lake",
    storage="bookkeeping_uri check_writable files_of target_uri write_parquet",
)
