"""Which worker, now or later: pure decisions on plain data, with the clock handed in."""
