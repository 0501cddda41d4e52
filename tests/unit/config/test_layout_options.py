"""Which options of a layout exclude each other, and how a table's own take the default's place."""

import pytest
from pydantic import ValidationError

from waldelta.config.layout_options import LayoutOptions


@pytest.mark.parametrize(
    "options, text",
    [
        ({"partition_by": ["a"], "cluster_by": ["b"]}, "partition_by and cluster_by exclude"),
        ({"z_order": ["a"], "cluster_by": ["b"]}, "z_order and cluster_by exclude"),
        ({"z_order": ["a"], "partition_by": ["a"]}, "a has one value in each partition"),
        ({"z_order": ["a"], "statistics": ["b"]}, "z_order needs statistics of its columns: add a"),
        ({"z_order": ["a", "a"]}, "each column is named once"),
        ({"z_order": ["_wd_lsn"]}, "waldelta's own column"),
    ],
    ids=str,
)
def test_options_that_exclude_each_other_are_refused(options, text):
    with pytest.raises(ValidationError, match=text):
        LayoutOptions(**options)


@pytest.mark.parametrize(
    "own, default, result",
    [
        ({}, {"z_order": ["a"]}, {"z_order": ("a",)}),
        ({"z_order": []}, {"z_order": ["a"]}, {"z_order": ()}),
        ({"cluster_by": ["b"]}, {"z_order": ["a"]}, {"cluster_by": ("b",)}),
        ({"cluster_by": ["b"]}, {"partition_by": ["a"]}, {"cluster_by": ("b",)}),
        ({"z_order": ["b"]}, {"cluster_by": ["a"]}, {"z_order": ("b",)}),
        ({"z_order": ["b"]}, {"partition_by": ["a"]}, {"z_order": ("b",), "partition_by": ("a",)}),
    ],
    ids=str,
)
def test_a_tables_own_options_take_the_defaults_place(own, default, result):
    options = LayoutOptions(**own).over(LayoutOptions(**default))
    assert options.model_dump(exclude_none=True, exclude={"properties"}) == result
