"""Logs, spans, histograms and step traces."""
