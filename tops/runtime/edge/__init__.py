"""What a broker checks of every message of a site: rights, bounds in bytes, and whether events fit their types."""
