"""Serves one model from one or several engines: places requests, handles the deaths of engines."""
