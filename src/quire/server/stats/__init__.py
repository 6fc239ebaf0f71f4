"""The operator's live numbers: snapshots of the engines, and a stream of their changes."""
