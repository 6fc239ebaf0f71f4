"""Logs, spans, histograms, traces of steps; memory of the machine."""
