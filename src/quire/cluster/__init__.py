"""Serves one model from several engines: places requests, watches engines and handles failures."""
