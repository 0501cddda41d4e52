"""The change log: raw pgoutput messages as landed, and their ranges, order and counts."""
