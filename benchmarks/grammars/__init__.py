"""Grammars at work: what masks cost a crowd, how schemas fare."""
