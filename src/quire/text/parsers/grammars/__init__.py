"""Writes grammars that allow only messages that the dialect's parser can parse."""
