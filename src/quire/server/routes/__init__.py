"""The HTTP endpoints, one file each, in a folder for each API."""
