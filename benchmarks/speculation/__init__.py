"""Speculative decoding: an engine with drafts beside one without, on texts that repeat and others.

`workloads` makes tasks from a git repository's own files, `replay` forces a model's outputs to
known texts, and `sides` runs the two engines in turns. `command` is the command line.
"""
