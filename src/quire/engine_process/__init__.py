"""The processes of an engine and its ranks: their entry points, and the engine's main loop."""
