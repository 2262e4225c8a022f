"""The other side: traces, their generation and replay, and reports."""
