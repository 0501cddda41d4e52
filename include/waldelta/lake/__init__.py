"""Everything that writes to Delta Lake: storage, layout, durability, statistics of data files."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.lake.data_file import DataFile, replace_by_rows
    from waldelta.lake.delta_log import DeltaLog, Overtaken, Tag
    from waldelta.lake.delta_target import (
        READ_FAILURES,
        WRITE_FAILURES,
        CommitConflict,
        DeltaTarget,
        TableError,
        TargetVersion,
        query,
    )
    from waldelta.lake.driver_limits import MOST_DRIVER_BYTES
    from waldelta.lake.fence import UNFENCED, Fence
    from waldelta.lake.lake import Lake
    from waldelta.lake.staging_leftovers import staging_folder
    from waldelta.lake.storage import (
        MESSAGES,
        bookkeeping_uri,
        by_row_group,
        check_writable,
        local_path,
        move_folder,
        open_parquet,
        parquet_format,
        remove_folder,
        row_count,
        target_uri,
        why_not_writable,
        write_parquet,
    )
    from waldelta.lake.store_connection import REQUEST_LIMITS, is_store_variable, read_store_options
    from waldelta.lake.write_errors import named_write_errors, not_writable_by_spark

__all__ = [
    "MESSAGES",
    "MOST_DRIVER_BYTES",
    "READ_FAILURES",
    "REQUEST_LIMITS",
    "UNFENCED",
    "WRITE_FAILURES",
    "CommitConflict",
    "DataFile",
    "DeltaLog",
    "DeltaTarget",
    "Fence",
    "Lake",
    "Overtaken",
    "TableError",
    "Tag",
    "TargetVersion",
    "bookkeeping_uri",
    "by_row_group",
    "check_writable",
    "is_store_variable",
    "local_path",
    "move_folder",
    "named_write_errors",
    "not_writable_by_spark",
    "open_parquet",
    "parquet_format",
    "query",
    "read_store_options",
    "remove_folder",
    "replace_by_rows",
    "row_count",
    "staging_folder",
    "target_uri",
    "why_not_writable",
    "write_parquet",
]
__getattr__ = lazy_exports(
    __name__,
    data_file="DataFile replace_by_rows",
    delta_log="DeltaLog Overtaken Tag",
    delta_target=(
        "CommitConflict DeltaTarget READ_FAILURES TableError TargetVersion WRITE_FAILURES query"
    ),
    driver_limits="MOST_DRIVER_BYTES",
    fence="Fence UNFENCED",
    lake="Lake",
    staging_leftovers="staging_folder",
    storage=(
        "MESSAGES bookkeeping_uri by_row_group check_writable local_path move_folder open_parquet "
        "parquet_format remove_folder row_count target_uri why_not_writable write_parquet"
    ),
    store_connection="REQUEST_LIMITS is_store_variable read_store_options",
    write_errors="named_write_errors not_writable_by_spark",
)
