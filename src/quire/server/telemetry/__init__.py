"""What the server records of its calls: ids, log lines, counts, times, spans."""
