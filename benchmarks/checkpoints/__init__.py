"""Model folders: how fast they load, and what damaged ones do."""
