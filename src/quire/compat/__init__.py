"""Names of other engines, with quire's equivalents, or the reasons why it has none."""
