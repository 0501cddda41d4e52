"""Every write to Delta Lake: storage, layout, durability, statistics of data files."""
