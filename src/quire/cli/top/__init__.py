"""The command `quire top`: requests, steps and memory of a running server, live in the terminal."""
