"""Bytes in, bytes out: HTTP, API dialects, streaming. Decides nothing about placement."""
