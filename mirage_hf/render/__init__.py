"""Draw graphs and write HTML reports."""
