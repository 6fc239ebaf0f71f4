"""The interactive chat: answers of an engine or a server, commands, and the terminal."""
