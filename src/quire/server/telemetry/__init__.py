"""Records the server's calls: ids, log lines, counts, times, spans."""
