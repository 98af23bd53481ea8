"""Tables, plots, self-contained HTML."""
